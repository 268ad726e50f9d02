"""Coverage and false verdicts of the interval of a run's speed-up, simulated: with drift, unlike prompts, and stalls.

    python benchmarks/stalls.py

`bootstrap` is the paired bootstrap alone, `shown` the interval that a run has. A verdict is false where the ratio is 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import CONFIDENCE, Interval
from harness.results.statistics.ratios import bootstrapped, ratio_of_totals

NUM_RUNS = 2_000
NUM_RESAMPLES = 1_000
# Times of the regular and of the speculative arm, [2, num_units].
Times = Callable[[np.random.Generator, int], Floats]


def quiet(ratio: float) -> Times:
    return lambda rng, size: rng.lognormal(0, 0.02, (2, size)) * [[ratio], [1]]


def unlike(ratio: float) -> Times:
    """Prompts of unlike lengths, which the draft suits more or less."""

    def times(rng: np.random.Generator, size: int) -> Floats:
        noise = rng.lognormal(0, 0.15, (2, size)) * [[ratio], [1]]
        return np.asarray(noise * rng.lognormal(0, 0.4, size))

    return times


def drifting(ratio: float) -> Times:
    """A machine that slows down by 30 % within the run."""

    def times(rng: np.random.Generator, size: int) -> Floats:
        noise = rng.lognormal(0, 0.05, (2, size)) * [[ratio], [1]]
        return np.asarray(noise * np.linspace(1, 1.3, size))

    return times


def stalling(ratio: float, share: float, times_as_long: float) -> Times:
    """Answers of both arms that take many times as long now and then."""

    def times(rng: np.random.Generator, size: int) -> Floats:
        factors = np.where(rng.random((2, size)) < share, times_as_long, 1)
        return np.asarray(rng.lognormal(0, 0.02, (2, size)) * factors * [[ratio], [1]])

    return times


CASES: dict[str, tuple[Times, float]] = {
    "quiet": (quiet(1), 1),
    "quiet, 1.6": (quiet(1.6), 1.6),
    "unlike prompts": (unlike(1), 1),
    "unlike prompts, 1.6": (unlike(1.6), 1.6),
    "drift of 30 %": (drifting(1), 1),
    "drift of 30 %, 1.6": (drifting(1.6), 1.6),
    "1 in 20 stalls, 4 times": (stalling(1, 0.05, 4), 1),
    "1 in 10 stalls, 4 times": (stalling(1, 0.1, 4), 1),
    "1 in 10 stalls, 4 times, 1.6": (stalling(1.6, 0.1, 4), 1.6),
    "1 in 5 stalls, 4 times": (stalling(1, 0.2, 4), 1),
    "1 in 10 stalls, 11 times": (stalling(1, 0.1, 11), 1),
    "1 in 10 stalls, 1.5 times": (stalling(1, 0.1, 1.5), 1),
}


def main() -> None:
    print(f"{'':30} units  covers: bootstrap  shown   false verdicts: bootstrap  shown")
    for name, (times, truth) in CASES.items():
        for size in (8, 15, 30):
            rng = np.random.default_rng(0)
            runs = [intervals(*times(rng, size)) for _ in range(NUM_RUNS)]
            covers = [
                np.mean([one.low <= truth <= one.high for one in of])
                for of in zip(*runs, strict=True)
            ]
            wrong = [np.mean([one.excludes(1) for one in of]) for of in zip(*runs, strict=True)]
            text = f"{name:30} {size:5}  {covers[0]:17.1%}  {covers[1]:5.1%}"
            print(text if truth != 1 else f"{text}   {wrong[0]:25.1%}  {wrong[1]:5.1%}")


def intervals(regular: Floats, speculative: Floats) -> tuple[Interval, Interval]:
    def ratio(tops: Floats, bottoms: Floats, axis: int) -> Floats:
        return np.asarray(tops.sum(axis=axis) / bottoms.sum(axis=axis))

    bounds = bootstrapped((regular, speculative), ratio, NUM_RESAMPLES, 0, CONFIDENCE)
    estimate = float(ratio(regular, speculative, 0))
    shown = ratio_of_totals(regular, speculative, NUM_RESAMPLES, 0)
    return Interval(estimate, *bounds), shown


if __name__ == "__main__":
    main()
