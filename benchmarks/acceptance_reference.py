"""Is what `acceptance` computes what decoding accepts, and are its intervals right, narrow and quick?

    python benchmarks/acceptance_reference.py --draft tiny_draft --temperature 0.5 [--rounds 17]

The speculative arm answers the 40 prompts of the tiny pair `--rounds` times with K = 2, 4 and 8, with other random
numbers each time: tokens per iteration over all of these answers are the long-run value. `acceptance` reads all the
texts. A line for each K compares what it expects of the texts of the other two K (*other texts*) and of those of this
one (*the same texts*, where nothing but the coins of decoding differs) with the long run, with the standard errors.

Then 1,000 repetitions draw 15 prompts, or 30, with four texts for each as `acceptance` writes them, and with one answer
for each as `latency` decodes it: how often their intervals hold the value of all, and how wide the two are. Both cover
the choice of the prompts and what the target draws for them. Where the width comes from is the last line: the variance
of an answer's iterations is that between prompts, between texts of a prompt, and that of the coins for a text.
`acceptance` has no coins; one that knew the expectation of every prompt would still have the first, which bounds what
any can reach.

With `--seconds`: of the processor, for 15 prompts, to write and read their texts and to decode both arms.
At temperature 0 all answers to a prompt are the same, and one round is enough.
"""

from __future__ import annotations

import dataclasses
import time

import common
import numpy as np
from numpy.typing import NDArray

from harness.commands.acceptance.record import AcceptanceSettings
from harness.config.settings import DecodingSettings
from harness.engines.local.engine import LocalEngine
from harness.engines.local.reading import TextReader
from harness.engines.pair import Pair
from harness.engines.protocol import Question
from harness.engines.record import Preparation
from harness.engines.requests import RequestRecord
from harness.engines.timing import generate
from harness.results.statistics.ratios import ratio_of_totals, skewed_ratio_of_totals

NUMBERS = (2, 4, 8)
NUM_PROMPTS = 40
UNITS = (15, 30)
TEXTS = AcceptanceSettings.texts_per_prompt
REPETITIONS = 1000
NEW_TOKENS = 64

Counts = NDArray[np.float64]


def answered(
    pair: Pair,
    prompts: list[list[int]],
    decoding: DecodingSettings,
    number: int,
    arm: int,
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
        indices = range(1000 * repeat, 1000 * repeat + len(prompts))
        question = Question(prompts, how, 1 + arm, indices)
        found += generate(engine, engine.arms[arm], question).requests
    engine.close()
    return found


def expected(reader: TextReader, prompt: list[int], text: list[int]) -> tuple[Counts, Counts]:
    """The iterations that `acceptance` expects for each of `NUMBERS`, and their variance by coins."""
    cuts = reader.read(prompt, text).cut
    places = [number - 1 for number in NUMBERS]
    return cuts.iterations[places], cuts.variance[places]


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
        held = [0, 0]
        widths: list[list[float]] = [[], []]
        for repetition in range(REPETITIONS):
            asked = chosen.choice(NUM_PROMPTS, units)
            # `rounds` is 1 at temperature 0, where all texts of a prompt are the same.
            written = chosen.integers(0, len(other), (1 if rounds == 1 else TEXTS, units))
            of_prompts = other[written, asked].mean(axis=0)
            answers = decoded[chosen.integers(0, len(decoded), units), asked]
            all_tokens = np.full(units, tokens)
            intervals = (
                skewed_ratio_of_totals(all_tokens, of_prompts),
                ratio_of_totals(all_tokens, answers, 1000, repetition),
            )
            for side, found in enumerate(intervals):
                held[side] += not found.excludes(truths[side])
                widths[side].append(found.high - found.low)
        print(
            f"  intervals of {units} prompts hold it {held[0] / REPETITIONS:.1%} (latency's"
            f" {held[1] / REPETITIONS:.1%}), {np.median(widths[0]) / np.median(widths[1]):.2f} times as wide",
            flush=True,
        )
    if rounds > 1:
        of_texts = float(other.var(axis=0, ddof=1).mean())
        of_prompts = max(float(other.mean(axis=0).var(ddof=1)) - of_texts / len(other), 0.0)
        total = of_prompts + of_texts + float(coins.mean())
        print(
            f"  variance of iterations: prompts {of_prompts / total:.0%}, texts of a prompt"
            f" {of_texts / total:.0%}, coins {coins.mean() / total:.0%}",
            flush=True,
        )


def main() -> None:
    parser = common.parser(__doc__, temperature=0.5, rounds=17)
    parser.add_argument("--seconds", action="store_true", help="also time both on 15 prompts")
    parser.add_argument("--save", help="an .npz file for the counts")
    options = parser.parse_args()
    settings = common.cpu_settings(options, f"decoding.temperature={options.temperature}")
    decoding = dataclasses.replace(
        settings.decoding, max_new_tokens=NEW_TOKENS, ignore_eos=True, num_draft_tokens=max(NUMBERS)
    )
    pair = common.load(settings)
    prompts = common.read_prompts(settings, pair, NUM_PROMPTS)
    rounds = 1 if options.temperature == 0 else options.rounds
    reader = TextReader(pair, decoding, max(NUMBERS))
    counted = np.zeros((len(NUMBERS), rounds, NUM_PROMPTS))
    # Of the texts of each K, for each K.
    means = np.zeros((len(NUMBERS), rounds, NUM_PROMPTS, len(NUMBERS)))
    variances = np.zeros_like(means)
    for place, number in enumerate(NUMBERS):
        answers = answered(pair, prompts, decoding, number, 1, rounds)
        for index, request in enumerate(answers):
            where = (place, *divmod(index, NUM_PROMPTS))
            counted[where] = len(request.outcomes)
            means[where], variances[where] = expected(
                reader, prompts[index % NUM_PROMPTS], request.token_ids
            )
    if options.save:
        np.savez(options.save, counted=counted, means=means, variances=variances)
    print(f"draft={options.draft} temperature={options.temperature:g}", flush=True)
    for place in range(len(NUMBERS)):
        report(counted, means, variances, place)
    if options.seconds:
        few = prompts[: UNITS[0]]
        started = time.process_time()
        texts = [
            request.token_ids for request in answered(pair, few, decoding, 4, 0, min(rounds, TEXTS))
        ]
        wrote = time.process_time()
        for place, text in enumerate(texts):
            expected(reader, few[place % len(few)], text)
        ready = time.process_time()
        for prompt in few:
            for arm in (0, 1):
                answered(pair, [prompt], decoding, 4, arm, 1)
        decoded = time.process_time()
        print(
            f"processor seconds for {len(few)} prompts: {wrote - started:.1f} to write {len(texts)} texts,"
            f" {ready - wrote:.1f} to read them, {decoded - ready:.1f} to decode both arms one by one",
            flush=True,
        )


if __name__ == "__main__":
    main()
