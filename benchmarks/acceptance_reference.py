"""Checks `acceptance` against decoding: are its figures right, are its intervals right and narrow, and is it fast?

    python benchmarks/acceptance_reference.py --draft tiny_draft --temperature 0.5 [--rounds 17]

The speculative arm answers the 40 prompts of the tiny pair `--rounds` times with each of K = 2, 4 and 8, with different
random numbers each time. The tokens per iteration over all answers with one K are its *long-run value*. `acceptance`
then reads all texts. For each K, three results are printed.

The first line compares the long-run value with the expectation of `acceptance`, with standard errors. The expectation
is computed once from the texts of the other two K (*other texts*), and once from the texts of this K (*the same texts*,
for which only the random numbers of accepting, the *coins*, differ).

The second result is about intervals of tokens per iteration. 1,000 repetitions draw 15 or 30 prompts, with four texts
for each prompt (as `acceptance` has them) and with one answer for each prompt (as `latency` has them). Printed is how
often either kind of interval contains the long-run value, and how wide the first kind is relative to the second. Both
kinds cover the choice of prompts and the target's random texts. The same is printed for a speed-up, whose times are
made up of a step per token and a constant per iteration, with 3 % of noise in both.

The last line shows where the width comes from. The variance of an answer's number of iterations has three parts:
between prompts, between texts of a prompt, and from the coins for a text. `acceptance` has no coins. With any number of
texts per prompt, the variance between prompts would remain. So there is a *floor* for the width of its intervals, which
is printed as a share of the width of `latency`'s intervals.

With `--seconds N`, only the processor time of `acceptance` and of `latency` over 15 prompts is measured, N times
alternately. At temperature 0 all answers to a prompt are identical, so one round is used.
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
    """Answer all prompts with K = `number` in each of `rounds` rounds, and return the records, round by round."""
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
    """The mean of figures [rounds, prompts], and its standard error for rounds that have these same prompts."""
    within = figures.var(axis=0, ddof=1).mean() if len(figures) > 1 else 0.0
    return float(figures.mean()), float(np.sqrt(within / figures.size))


def report(counted: Counts, means: Counts, variances: Counts, place: int) -> None:
    """Print the results for one K (see the module's docstring).

    Args:
        counted, means, variances: from `counts`.
        place: the index of K in `NUMBERS`.
    """
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
    # The repetitions draw from these texts and answers, so their true values are known exactly.
    truths = (tokens / other.mean(), tokens / decoded.mean())
    chosen = np.random.default_rng(0)
    for units in UNITS:
        held = dict.fromkeys(("expected", "decoded", "speedup"), 0)
        widths: dict[str, list[float]] = {name: [] for name in held}
        all_tokens = np.full(units, tokens)
        for _ in range(REPETITIONS):
            asked = chosen.choice(NUM_PROMPTS, units)
            # With a single round (temperature 0), all texts of a prompt are identical.
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
    """Decode and read all texts.

    Returns:
        The number of iterations in decoding, [K, rounds, prompts]; and the number that `acceptance` expects for each
        text of the first K if it is decoded with the second K, [K, rounds, prompts, K], with its variance from coins.
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
    """Print the processor time of both commands, which run alternately in this process. The first run of each command
    is left out.
    """
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
