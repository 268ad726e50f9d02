"""Is what `acceptance` computes what decoding accepts, and are its intervals right, narrow and quick?

    python benchmarks/acceptance_reference.py --draft tiny_draft --temperature 0.5 [--rounds 17]

The speculative arm answers the 40 prompts of the tiny pair `--rounds` times with K = 2, 4 and 8, with other random
numbers each time: tokens per iteration over all of these answers are the long-run value. `acceptance` reads all the
texts. A line for each K compares what it expects of the texts of the other two K (*other texts*) and of those of this
one (*the same texts*, where nothing but the coins of decoding differs) with the long run, with the standard errors.

Then 1,000 repetitions draw 15 prompts, or 30, with four texts for each as `acceptance` writes them, and with one answer
for each as `latency` decodes it: how often their intervals of tokens per iteration hold the value of all, and how wide
the two are. Both cover the choice of the prompts and what the target draws for them. The same for a speed-up whose
times are a step for each token and a constant for each iteration, with 3 % of noise in both. In brackets is what a
bootstrap would hold; of the speed-up, which has a bootstrap, what the correction for skewness would.

Where the width comes from is the last line: the variance of an answer's iterations is that between prompts, between
texts of a prompt, and that of the coins for a text. `acceptance` has no coins; one that knew the expectation of every
prompt would still have the first: the *floor*, as a share of `latency`'s width, that no number of texts goes below.

With `--seconds N`, instead: the processor time of `acceptance` and of `latency` over 15 prompts, N times in turn.
At temperature 0 all answers to a prompt are the same, and one round is enough.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path

import common
import numpy as np
from numpy.typing import NDArray

import harness
from harness.commands.acceptance.record import AcceptanceSettings
from harness.config.settings import DecodingSettings
from harness.engines.door.reading import Transcript
from harness.engines.protocol import Question, Request
from harness.engines.record import Preparation
from harness.engines.requests import RequestRecord
from harness.engines.timing import timed_answer
from harness.local.drafting.method import Pair
from harness.local.engine.engine import LocalEngine
from harness.local.engine.reading import PairReader
from harness.results.statistics.ratios import ratio_of_totals

NUMBERS = (2, 4, 8)
NUM_PROMPTS = 40
UNITS = (15, 30)
NOISE = 0.03
TEXTS = AcceptanceSettings.texts_per_prompt
REPETITIONS = 1000
NEW_TOKENS = 64

Counts = NDArray[np.float64]


def answered(
    pair: Pair,
    prompts: list[list[int]],
    decoding: DecodingSettings,
    number: int,
    rounds: int,
) -> list[RequestRecord]:
    """Each answer, a round of all prompts after the other."""
    found: list[RequestRecord] = []
    how = dataclasses.replace(decoding, num_draft_tokens=number)
    preparation = Preparation(
        decoding=how, runner="static", batch_size=len(prompts), longest_prompt=128
    )
    engine = LocalEngine(pair, preparation)
    for repeat in range(rounds):
        requests = [
            Request(prompt, how, seed=2, index=1000 * repeat + row)
            for row, prompt in enumerate(prompts)
        ]
        found += timed_answer(engine, engine.arms[1], Question(requests)).requests
    engine.close()
    return found


def differences(figures: Counts) -> tuple[float, float]:
    """The mean over prompts and rounds [rounds, prompts], and its standard error: the prompts are the same ones."""
    within = figures.var(axis=0, ddof=1).mean() if len(figures) > 1 else 0.0
    return float(figures.mean()), float(np.sqrt(within / figures.size))


def report(counted: Counts, means: Counts, variances: Counts, place: int) -> None:
    """Print what there is to know of one K: whether it agrees, and how wide and right its intervals are."""
    number = NUMBERS[place]
    rounds = counted.shape[1]
    tokens = float(NEW_TOKENS - 1)
    decoded = counted[place]
    same = means[place, :, :, place]
    coins = variances[place, :, :, place]
    other = np.delete(means, place, axis=0)[..., place].reshape(-1, NUM_PROMPTS)
    truth = tokens / decoded.mean()
    on_same, same_error = differences(decoded - same)
    long_run, long_run_error = differences(decoded)
    on_other, other_error = differences(other)
    other_error = float(np.hypot(long_run_error, other_error))
    print(
        f"K={number}: {truth:.3f} tokens per iteration in {decoded.size} answers; expected of {other.size} other texts"
        f" {long_run / on_other - 1:+.2%} (standard error {other_error / long_run:.2%}), of the same texts"
        f" {on_same / same.mean():+.2%} ({same_error / long_run:.2%}; by its variance"
        f" {np.sqrt(coins.sum()) / decoded.sum():.2%})",
        flush=True,
    )
    # Of texts and answers that were drawn from these ones, the long run is known exactly.
    truths = (tokens / other.mean(), tokens / decoded.mean())
    chosen = np.random.default_rng(0)
    for units in UNITS:
        held = dict.fromkeys(("expected", "decoded", "speedup"), 0)
        widths: dict[str, list[float]] = {name: [] for name in held}
        all_tokens = np.full(units, tokens)
        for _ in range(REPETITIONS):
            asked = chosen.choice(NUM_PROMPTS, units)
            # `rounds` is 1 at temperature 0, where all texts of a prompt are the same.
            written = chosen.integers(0, len(other), (1 if rounds == 1 else TEXTS, units))
            prompt_part = other[written, asked].mean(axis=0)
            answers = decoded[chosen.integers(0, len(decoded), units), asked]
            regular = all_tokens * chosen.lognormal(-(NOISE**2) / 2, NOISE, units)
            speculative = answers * chosen.lognormal(-(NOISE**2) / 2, NOISE, units)
            intervals = {
                "expected": ratio_of_totals([all_tokens], [prompt_part]),
                "decoded": ratio_of_totals([all_tokens], [answers]),
                "speedup": ratio_of_totals([regular], [speculative]),
            }
            for name, found in intervals.items():
                held[name] += not found.excludes(truths[name != "expected"])
                widths[name].append(found.high - found.low)
        shares = {name: f"{number / REPETITIONS:.1%}" for name, number in held.items()}
        width = np.median(widths["expected"]) / np.median(widths["decoded"])
        print(
            f"  intervals of {units} prompts hold it {shares['expected']}, {width:.2f} times as wide as latency's:"
            f" {shares['decoded']}; its speed-up {shares['speedup']}",
            flush=True,
        )
    if rounds > 1:
        text_part = float(other.var(axis=0, ddof=1).mean())
        prompt_part = max(float(other.mean(axis=0).var(ddof=1)) - text_part / len(other), 0.0)
        total = prompt_part + text_part + float(coins.mean())
        print(
            f"  variance of iterations: prompts {prompt_part / total:.0%}, texts of a prompt"
            f" {text_part / total:.0%}, coins {coins.mean() / total:.0%}; floor of the width"
            f" {np.sqrt(prompt_part / total):.2f}",
            flush=True,
        )


def counts(options: argparse.Namespace) -> tuple[Counts, Counts, Counts]:
    """Iterations that were decoded [K, rounds, prompts], and that are expected of the texts of each K for each K, with
    their variance by coins [K, rounds, prompts, K].
    """
    settings = common.cpu_settings(options, f"decoding.temperature={options.temperature}")
    decoding = dataclasses.replace(
        settings.decoding, max_new_tokens=NEW_TOKENS, ignore_eos=True, num_draft_tokens=max(NUMBERS)
    )
    pair = common.load(settings)
    prompts = common.read_prompts(settings, pair, NUM_PROMPTS)
    rounds = 1 if options.temperature == 0 else options.rounds
    reader = PairReader(pair, decoding, max(NUMBERS))
    counted = np.zeros((len(NUMBERS), rounds, NUM_PROMPTS))
    means = np.zeros((len(NUMBERS), rounds, NUM_PROMPTS, len(NUMBERS)))
    variances = np.zeros_like(means)
    places = [number - 1 for number in NUMBERS]
    for place, number in enumerate(NUMBERS):
        requests = answered(pair, prompts, decoding, number, rounds)
        texts = [request.token_ids for request in requests]
        read = [text for [text] in reader.read(map(Transcript.of, rounds * prompts, texts))]
        for index, (request, text) in enumerate(zip(requests, read, strict=True)):
            where = (place, *divmod(index, NUM_PROMPTS))
            counted[where] = len(request.outcomes)
            means[where] = text.cut.iterations[places]
            variances[where] = text.cut.variance[places]
    return counted, means, variances


def report_seconds(options: argparse.Namespace) -> None:
    """Print the processor time of both commands, which take turns in this process, after the first of each."""
    common_settings = {
        "draft": options.draft,
        "placement": "cpu",
        "decoding": {"temperature": options.temperature, "ignore_eos": True},
    }
    seconds: dict[str, list[float]] = {"acceptance": [], "latency": []}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for _ in range(1 + options.seconds):
            for command, so_far in seconds.items():
                started = time.process_time()
                harness.run(command, **common_settings)
                so_far.append(time.process_time() - started)
    measured = np.array(list(seconds.values()))[:, 1:]
    ratios = measured[0] / measured[1]
    print(
        f"{options.seconds} turns: acceptance {measured[0].mean():.1f} s, latency {measured[1].mean():.1f} s, without"
        f" imports: {measured[0].sum() / measured[1].sum():.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
    )


def main() -> None:
    parser = common.parser(__doc__, temperature=0.5, rounds=17, seconds=0)
    parser.add_argument("--counts", help="an .npz file for the counts; read where it exists")
    options = parser.parse_args()
    print(f"draft={options.draft} temperature={options.temperature:g}", flush=True)
    if options.seconds:
        report_seconds(options)
        return
    if options.counts and Path(options.counts).exists():
        with np.load(options.counts) as file:
            found = file["counted"], file["means"], file["variances"]
    else:
        found = counts(options)
        if options.counts:
            np.savez(options.counts, counted=found[0], means=found[1], variances=found[2])
    for place in range(len(NUMBERS)):
        report(*found, place)


if __name__ == "__main__":
    main()
