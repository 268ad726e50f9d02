"""Measures how often 95 % intervals contain the true value, in simulated measurements. Needs no model.

    python benchmarks/intervals.py [--repetitions 1000]

Each line is a *world* (a way to draw times), and each column a number of prompts. Runs with too few effective prompts
have no interval, and do not count. The worlds are:

- speed-ups: noise, prompts that differ, drift, stalls of one arm or of both, and answers with unequal lengths whose
  acceptance depends on the length;
- tokens per iteration: of answers with equal lengths, and of answers that end by themselves;
- drafts that are hardly ever rejected; runs whose page notes that few prompts had rejections are counted separately;
- `repeats=`: intervals over runs and prompts;
- `precision=`: intervals of runs that stopped when they were precise enough.

It also measures how many tables of equal alternatives show a difference.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import Pool
from multiprocessing.pool import Pool as ProcessPool

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm as normal

from harness.results.statistics.interval import DASH, Interval
from harness.results.statistics.multiplicity import relative_speedup
from harness.results.statistics.ratios import ExtraIterations, ratio_of_totals
from harness.results.statistics.runs import ratio_over_runs
from harness.results.statistics.stopping import CONFIDENCE_OF_LOOKS, is_precise, looks

Floats = NDArray[np.float64]
# Draws a measurement with a number of prompts: the times of both arms, or tokens and iterations, [2, num_prompts]. For
# answers with unequal lengths, the lengths are a third row.
Draw = Callable[[np.random.Generator, int], Floats]

# Takes a number of measurements and a number of prompts, and yields, for each measurement, whether it is right.
Each = Callable[[int, int], Iterator[bool]]

NUM_PROMPTS = (8, 15, 30)
# A true value that has no formula is computed from this many prompts.
MANY = 200_000


def noisy(rng: np.random.Generator, size: int, *, noise: float, hardness: float = 0.0) -> Floats:
    """Both arms vary independently, with `noise`. Prompts differ by `hardness`, equally in both arms."""
    return np.exp(rng.normal(0, noise, (2, size)) + rng.normal(0, hardness, size))


def drifting(rng: np.random.Generator, size: int) -> Floats:
    """A machine that slows down by 30 % within the run."""
    return noisy(rng, size, noise=0.05) * np.linspace(1, 1.3, size)


def stalling(
    rng: np.random.Generator, size: int, *, share: float, factor: float, num_arms: int = 2
) -> Floats:
    """Now and then an answer takes many times as long, in both arms or only in the regular one.

    Args:
        share: the share of answers that stall.
        factor: how many times as long these take.
        num_arms: 2 for both arms, 1 for the regular one.
    """
    stalls = rng.random((2, size)) < share
    stalls[num_arms:] = False
    return noisy(rng, size, noise=0.02) * np.where(stalls, factor, 1)


def unequal(
    rng: np.random.Generator,
    size: int,
    *,
    correlation: float,
    spread: float = 0.0,
    length_of: Callable[[Floats], Floats] | None = None,
) -> Floats:
    """Long answers have a larger speed-up, or a smaller one. The prompts' speed-ups vary by 25 %.

    Args:
        correlation: the correlation of the logarithm of the speed-up with the normal score of the length.
        spread: the standard deviation of the logarithms of lengths, which are log-normal.
        length_of: turns normal scores into lengths; None for log-normal lengths.
    """
    score, rest = rng.normal(size=(2, size))
    lengths = np.exp(spread * score) if length_of is None else length_of(score)
    own = correlation * score + math.sqrt(1 - correlation**2) * rest
    regular, speculative = lengths * noisy(rng, size, noise=0.05)
    return np.stack([regular, speculative * np.exp(-0.25 * own) / 2, lengths])


def short_and_long(score: Floats) -> Floats:
    """Lengths of which 70 % are 20 tokens and 30 % are 400."""
    return np.where(score < 0.5244, 20.0, 400.0)


def heavy_tailed(score: Floats) -> Floats:
    """Lengths with a Pareto distribution with an exponent of 1.5, up to 100 times the shortest."""
    return np.asarray(np.minimum((1 - normal.cdf(score)) ** (-1 / 1.5), 100.0))


def iterations(
    rng: np.random.Generator, size: int, *, spread: float, ends: bool, num_draft_tokens: int = 4
) -> Floats:
    """Tokens after the first, and iterations, of answers with 40 tokens. A draft token is accepted with a probability
    of about 80 %, which varies by prompt.

    Args:
        spread: the standard deviation of the log-odds of acceptance between prompts.
        ends: whether answers end by themselves; they then have 40 tokens on average.
    """
    accepted = 1 / (1 + np.exp(-math.log(4) - rng.normal(0, spread, size)))
    tokens = rng.geometric(1 / 39, size) if ends else np.full(size, 39)
    decoded, number = np.zeros(size), np.zeros(size)
    while (decoded < tokens).any():
        is_accepted = rng.random((num_draft_tokens, size)) < accepted
        gained = 1 + np.cumprod(is_accepted, axis=0).sum(axis=0)
        number += decoded < tokens
        decoded = np.minimum(decoded + gained, tokens)
    return np.stack([tokens, number])


def rarely_rejected(
    rng: np.random.Generator,
    size: int,
    *,
    accepted: float,
    num_draft_tokens: int,
    rejecting: float = 0.0,
) -> Floats:
    """Times of both arms for answers with 32 tokens, and the numbers of iterations: actual and fewest possible.

    Args:
        accepted: the probability that a draft token is accepted.
        rejecting: the share of prompts in which this probability is 70 %.
    """
    chances = np.where(rng.random(size) < rejecting, 0.7, accepted)
    decoded, number = np.zeros(size), np.zeros(size)
    while (decoded < 31).any():
        is_accepted = rng.random((num_draft_tokens, size)) < chances
        number += decoded < 31
        decoded += 1 + np.cumprod(is_accepted, axis=0).sum(axis=0)
    regular, speculative = noisy(rng, size, noise=0.004)
    fewest = np.full(size, math.ceil(31 / (num_draft_tokens + 1)))
    return np.stack([31 * regular, number * speculative, number, fewest])


RARE: dict[str, Draw] = {
    f"{accepted:.1%} accepted, K={k}{', 1 of 20 prompts 70 %' if rejecting else ''}": partial(
        rarely_rejected, accepted=accepted, num_draft_tokens=k, rejecting=rejecting
    )
    for accepted, rejecting in (
        *((accepted, 0.0) for accepted in (0.9, 0.97, 0.99, 0.995, 0.998)),
        (0.998, 0.05),
    )
    for k in (4, 8)
}
WORLDS: dict[str, Draw] = {
    "noise 2 %": partial(noisy, noise=0.02),
    "noise 15 %, prompts differ by 40 %": partial(noisy, noise=0.15, hardness=0.4),
    "drift of 30 %": drifting,
    "1 of 20 stalls, 4 times": partial(stalling, share=0.05, factor=4),
    "1 of 10 stalls, 11 times": partial(stalling, share=0.1, factor=11),
    "1 of 20 stalls, 5 times, in the regular arm alone": partial(
        stalling, share=0.05, factor=5, num_arms=1
    ),
    **{
        f"lengths {spread}, correlation {correlation}": partial(
            unequal, spread=spread, correlation=correlation
        )
        for spread in (0.5, 0.8)
        for correlation in (-0.8, -0.5, 0.0, 0.5, 0.8)
    },
    **{
        f"lengths {name}, correlation {correlation}": partial(
            unequal, length_of=length_of, correlation=correlation
        )
        for name, length_of in (("20 or 400", short_and_long), ("of Pareto", heavy_tailed))
        for correlation in (-0.8, -0.5, 0.5, 0.8)
    },
    **{
        f"tokens per iteration, log-odds {spread}{', own ends' if ends else ''}": partial(
            iterations, spread=spread, ends=ends
        )
        for ends in (False, True)
        for spread in (0.3, 0.6, 1.0)
    },
}


def held(draw: Draw, num_repetitions: int, num_prompts: int) -> Iterator[bool]:
    """Yield, for each simulated run that has an interval, whether the interval contains the long-run ratio."""
    rng = np.random.default_rng(num_prompts)
    tops, bottoms, *_ = draw(np.random.default_rng(99), MANY)
    truth = tops.sum() / bottoms.sum()
    for _ in range(num_repetitions):
        top, bottom, *unequal_lengths = draw(rng, num_prompts)
        lengths = unequal_lengths[0] if unequal_lengths else None
        interval = ratio_of_totals([top], [bottom], lengths=lengths)
        if interval.has_bounds:
            yield holds(interval, truth)


def held_where_rare(
    draw: Draw, is_noted: bool, num_repetitions: int, num_prompts: int
) -> Iterator[bool]:
    """Like `held`, for drafts that are hardly ever rejected.

    Args:
        is_noted: whether to count only runs whose interval notes that rejections are rare; otherwise only the others.
    """
    rng = np.random.default_rng(num_prompts)
    tops, bottoms, *_ = draw(np.random.default_rng(99), MANY)
    truth = tops.sum() / bottoms.sum()
    for _ in range(num_repetitions):
        top, bottom, *counts = draw(rng, num_prompts)
        interval = ratio_of_totals([top], [bottom], extra_iterations=ExtraIterations(*counts))
        assert interval.covers is not None
        if is_noted == (interval.covers.num_rejecting is not None):
            yield holds(interval, truth)


def held_over_runs(
    lengths: float, runs: float, num_runs: int, num_repetitions: int, num_prompts: int
) -> Iterator[bool]:
    """Like `held`, for intervals over several runs of the same prompts.

    Args:
        lengths: the spread of the answers' lengths (see `unequal`).
        runs: the standard deviation between runs, as a share of the time; within runs it is 2 %.
    """
    rng = np.random.default_rng(num_prompts)
    draw = partial(unequal, spread=lengths, correlation=0.6)
    tops, bottoms, _ = draw(np.random.default_rng(99), MANY)
    truth = tops.sum() / bottoms.sum()
    for _ in range(num_repetitions):
        top, bottom, _ = draw(rng, num_prompts)
        rest = rng.normal(0, 0.02, (num_runs, num_prompts)) + rng.normal(0, runs, (num_runs, 1))
        yield holds(
            ratio_over_runs(top * np.exp(rest), np.tile(bottom, (num_runs, 1))).interval(), truth
        )


def held_when_precise(lengths: float, num_repetitions: int, precision: float) -> Iterator[bool]:
    """Like `held`, for runs that stop when they are this precise, at the latest after 1,000 prompts."""
    rng = np.random.default_rng(0)
    draw = partial(unequal, spread=lengths, correlation=0.6)
    tops, bottoms, _ = draw(np.random.default_rng(99), MANY)
    truth = tops.sum() / bottoms.sum()
    for _ in range(num_repetitions):
        top, bottom, _ = draw(rng, 1000)
        for size in looks(1000):
            arms = [top[:size]], [bottom[:size]]
            interval = ratio_of_totals(*arms, confidence=CONFIDENCE_OF_LOOKS)
            if is_precise(interval, precision):
                break
        yield holds(interval, truth)


def holds(interval: Interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high


def false_table(lengths: float, num_repetitions: int, num_prompts: int) -> Iterator[bool]:
    """Yield, for each simulated table of six equal alternatives, whether one is significantly slower than the best."""
    rng = np.random.default_rng(num_prompts)
    for _ in range(num_repetitions):
        hardness = rng.lognormal(0, lengths, num_prompts)
        tops = hardness[None]
        bottoms = hardness * np.exp(-rng.normal(0, 0.1, (6, 1, num_prompts)))
        best = bottoms[np.argmin(bottoms.sum(axis=(1, 2)))]
        yield any(relative_speedup((tops, bottom), (tops, best), 6).high < 1 for bottom in bottoms)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=1000)
    number = parser.parse_args().repetitions
    lines: dict[str, Each] = {name: partial(held, draw) for name, draw in WORLDS.items()}
    for lengths, runs, num_runs in ((0, 0.013, 2), (0, 0.05, 5), (0.8, 0.013, 2), (0.8, 0.05, 5)):
        name = f"{num_runs} runs that differ by {runs:.1%}, lengths {lengths}"
        lines[name] = partial(held_over_runs, lengths, runs, num_runs)
    print(f"{'95 % intervals hold, prompts:':50}{''.join(f'{size:14}' for size in NUM_PROMPTS)}")
    with Pool() as pool:
        show(pool, lines, number)
        for is_noted in (False, True):
            noted = "is" if is_noted else "is not"
            print(f"\nhardly ever rejected, where that {noted} on the page (share of the runs)")
            rare: dict[str, Each] = {
                name: partial(held_where_rare, draw, is_noted) for name, draw in RARE.items()
            }
            show(pool, rare, number)
        print("\ntables of six equal alternatives that have a difference (5 % are allowed)")
        tables = {
            f"lengths {lengths}": partial(false_table, lengths) for lengths in (0.0, 0.5, 0.8)
        }
        show(pool, tables, number)
    print("\nruns that stop at ±10 % (95 % are to hold)")
    for lengths in (0.0, 0.8):
        share = np.mean([*held_when_precise(lengths, number // 5, 0.1)])
        print(f"{f'lengths {lengths}':50}{share:8.1%}")


def show(pool: ProcessPool, lines: Mapping[str, Each], number: int) -> None:
    """Print a line for each world, with the share for each number of prompts.

    The share of runs that have an interval follows in brackets if it is below 100 %.
    """
    for name, each in lines.items():
        found = pool.starmap(found_by, [(each, number, size) for size in NUM_PROMPTS])
        cells = []
        for are_right in found:
            share = "" if len(are_right) == number else f" ({len(are_right) / number:.0%})"
            cells.append(f"{np.mean(are_right):.1%}{share}" if are_right else DASH)
        print(f"{name:50}{''.join(f'{cell:>14}' for cell in cells)}", flush=True)


def found_by(each: Each, number: int, size: int) -> list[bool]:
    return [*each(number, size)]


if __name__ == "__main__":
    main()
