"""Is what `acceptance` computes what decoding accepts, and are its intervals right, narrow and quick?

    python benchmarks/acceptance_reference.py --draft tiny_draft --temperature 0.5 [--rounds 17]

The speculative arm answers the 40 prompts of the tiny pair `--rounds` times with K = 2, 4 and 8, with other random
numbers each time: tokens per iteration over all of these answers are the long-run value. `acceptance` reads all the
texts. A line for each K compares what it expects of the texts of the other two K (*other texts*) and of those of this
one (*the same texts*, where nothing but the coins of decoding differs) with the long run, with the standard errors.

Then 200 repetitions take 15 of the texts each, and 15 of the answers as `latency` would: how often the interval holds
the long-run value, and how wide the two are. Where the width comes from is the last line: the variance of an answer's
iterations is that between prompts, between texts of a prompt, and that of the coins for a text. `acceptance` has no
coins; one that knew the expectation of every prompt would still have the first, which bounds what any can reach.

With `--seconds`: of the processor, for 15 prompts, to read their texts and to decode both arms.
At temperature 0 all answers to a prompt are the same, and one round is enough.
"""

from __future__ import annotations

import dataclasses
import time

import common
import numpy as np
from numpy.typing import NDArray

from harness.engines.local.engine import LocalEngine
from harness.engines.local.reading import TextReader
from harness.engines.pair import Pair
from harness.engines.protocol import Question
from harness.engines.record import Preparation
from harness.engines.requests import RequestRecord
from harness.engines.timing import generate
from harness.results.statistics.ratios import ratio_of_totals

NUMBERS = (2, 4, 8)
NUM_PROMPTS = 40
UNITS = 15
REPETITIONS = 200
NEW_TOKENS = 64

Counts = NDArray[np.float64]


def answered(
    pair: Pair, prompts: list[list[int]], decoding: object, number: int, arm: int, rounds: int
) -> list[RequestRecord]:
    """Each answer, a round of all prompts after the other."""
    found: list[RequestRecord] = []
    how = dataclasses.replace(decoding, num_draft_tokens=number)  # type: ignore[type-var]
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
    chosen = np.random.default_rng(0)
    held = [0, 0]
    widths: list[list[float]] = [[], []]
    for repetition in range(REPETITIONS):
        asked = chosen.choice(NUM_PROMPTS, UNITS)
        for side, values in enumerate((other, decoded)):
            sample = values[chosen.integers(0, len(values), UNITS), asked]
            found = ratio_of_totals(np.full(UNITS, tokens), sample, 1000, repetition)
            held[side] += not found.excludes(truth)
            widths[side].append(found.high - found.low)
    line = (
        f"  intervals of 15 hold it {held[0] / REPETITIONS:.1%} (latency's {held[1] / REPETITIONS:.1%}),"
        f" {np.mean(widths[0]) / np.mean(widths[1]):.2f} times as wide"
    )
    if rounds > 1:
        of_texts = float(other.var(axis=0, ddof=1).mean())
        of_prompts = max(float(other.mean(axis=0).var(ddof=1)) - of_texts / len(other), 0.0)
        total = of_prompts + of_texts + float(coins.mean())
        line += (
            f"; variance of iterations: prompts {of_prompts / total:.0%}, texts of a prompt {of_texts / total:.0%},"
            f" coins {coins.mean() / total:.0%}"
        )
    print(line, flush=True)


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
        seconds = []
        texts = [request.token_ids for request in answered(pair, prompts, decoding, 4, 0, 1)]
        for _ in range(2):
            started = time.process_time()
            for place in range(UNITS):
                expected(reader, prompts[place], texts[place])
            seconds.append(time.process_time() - started)
        started = time.process_time()
        for prompt in prompts[:UNITS]:
            for arm in (0, 1):
                answered(pair, [prompt], decoding, 4, arm, 1)
        print(
            f"processor seconds for {UNITS} prompts: {min(seconds):.1f} to read their texts,"
            f" {time.process_time() - started:.1f} to decode both arms one by one",
            flush=True,
        )


if __name__ == "__main__":
    main()
