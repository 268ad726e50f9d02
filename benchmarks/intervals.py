"""How often 95 % intervals hold the long-run speed-up, in simulated measurements whose truth is known.

    python benchmarks/intervals.py [--repetitions 1000] [--runs 5] [--prompts 15] [--resamples 400]

Runs, prompts, and a prompt within a run vary by the standard deviations given, in percent. Three
intervals are compared: over the prompts of one run (`repeats=1`), the obvious two-level percentile
bootstrap (runs, then prompts in each), and ours over runs and prompts. Then false alarms and finds
of comparisons of two measurements, and the best of several. Needs no model.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.results.judging.change import Figure, judged_change
from harness.results.statistics.comparisons import compare
from harness.results.statistics.multiplicity import relative_to
from harness.results.statistics.ratios import ratio_of_totals
from harness.results.statistics.runs import ratio_over_runs

Floats = NDArray[np.float64]

SLOWDOWNS = (0.0, 0.02, 0.05, 0.1)
NUM_ALTERNATIVES = 6
_TIME = Figure("ms per token", "lower", ("faster", "slower"), timed=True)


class Spread(NamedTuple):
    """Standard deviations of the log of the speed-up, and of which kind their tails are."""

    runs: float
    prompts: float
    rest: float
    tails: str = "normal"


SPREADS = (
    Spread(0.0, 0.1, 0.02),
    Spread(0.013, 0.1, 0.02),
    Spread(0.013, 0.03, 0.01),
    Spread(0.05, 0.05, 0.05),
    Spread(0.05, 0.0, 0.01),
    Spread(0.0, 0.0, 0.05),
    Spread(0.013, 0.1, 0.02, "heavy, skewed"),
    Spread(0.05, 0.05, 0.05, "heavy, skewed"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("repetitions", 1000), ("runs", 5), ("prompts", 15), ("resamples", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"{options.repetitions} repetitions, {options.runs} runs of {options.prompts} prompts\n")
    report_coverage(options)
    report_comparisons(options)
    report_best(options)


def report_coverage(options: argparse.Namespace) -> None:
    show("runs %", "prompts %", "rest %", "tails", "one run", "two-level percentile", "ours")
    rng = np.random.default_rng(0)
    for spread in SPREADS:
        held = np.zeros(3)
        for _ in range(options.repetitions):
            tops, bottoms = measurement(rng, spread, options.runs, options.prompts)
            one_run = ratio_of_totals(tops[0], bottoms[0], options.resamples, seed=0)
            ours = ratio_over_runs(tops, bottoms).interval()
            low, high = two_level_percentile(rng, tops, bottoms, options.resamples)
            held += [one_run.low <= 2 <= one_run.high, low <= 2 <= high, ours.low <= 2 <= ours.high]
        shares = [f"{100 * value / options.repetitions:.1f}" for value in held]
        show(*(f"{100 * value:g}" for value in spread[:3]), spread.tails, *shares)
    print()


def report_comparisons(options: argparse.Namespace) -> None:
    show("slow-down %", "worse %", "better %", "no worse than 2 %")
    rng = np.random.default_rng(1)
    spread = Spread(0.013, 0.0, 0.02)
    for slowdown in SLOWDOWNS:
        worse, better, no_worse = 0, 0, 0
        for _ in range(options.repetitions):
            before, _ = measurement(rng, spread, options.runs, options.prompts)
            after, _ = measurement(rng, spread, options.runs, options.prompts)
            found = compare(before, (1 + slowdown) * after)
            worse += found.change.low > 1
            better += found.change.high < 1
            statement = judged_change(_TIME, found, margin=0.02)
            no_worse += statement.relation in ("better", "no worse")
        counts = (worse, better, no_worse)
        shares = [f"{100 * count / options.repetitions:.1f}" for count in counts]
        show(f"{100 * slowdown:g}", *shares)
    print()


def report_best(options: argparse.Namespace) -> None:
    rng = np.random.default_rng(2)
    naive, false_alarms = [], 0
    for _ in range(options.repetitions):
        hardness = rng.lognormal(0, 0.5, options.prompts)
        own = rng.normal(0.005, 0.1, (NUM_ALTERNATIVES, options.prompts))
        tops = np.broadcast_to(2 * hardness, own.shape)
        bottoms = hardness * np.exp(-own)
        ratios = tops.sum(axis=1) / bottoms.sum(axis=1)
        best = int(np.argmax(ratios))
        naive.append(ratios[best])
        false_alarms += any(share.high < 1 for share in relative_to(best, tops, bottoms))
    show("best of 6 equal ones", "its own figure", "false difference %")
    show("2.000", f"{np.mean(naive):.3f}", f"{100 * false_alarms / options.repetitions:.1f}")


def measurement(
    rng: np.random.Generator, spread: Spread, num_runs: int, num_prompts: int
) -> tuple[Floats, Floats]:
    """Times of both arms, [num_runs, num_prompts]; in the long run the first is twice the second.

    Prompts are also hard or easy, in both arms alike: the same ones in each measurement where
    their speed-ups do not vary.
    """
    run_noise = rng.normal(size=(num_runs, 1))
    prompt_noise = rng.normal(size=num_prompts)
    mean_of_prompts = np.exp(spread.prompts**2 / 2)
    if spread.tails != "normal":
        # Student's t on 3 degrees of freedom, and a gamma distribution of shape 2.
        run_noise = rng.standard_t(3, (num_runs, 1)) / np.sqrt(3)
        prompt_noise = (rng.gamma(2, size=num_prompts) - 2) / np.sqrt(2)
        scale = spread.prompts / np.sqrt(2)
        mean_of_prompts = np.exp(-2 * scale) / (1 - scale) ** 2
    hardness = rng.lognormal(0, 0.5, num_prompts)
    if not spread.prompts:
        hardness = np.geomspace(0.5, 2, num_prompts)
    rest = rng.normal(-(spread.rest**2) / 2, spread.rest, (num_runs, num_prompts))
    tops = 2 * hardness * np.exp(spread.runs * run_noise + rest)
    bottoms = hardness * np.exp(spread.prompts * prompt_noise) / mean_of_prompts
    return tops, np.broadcast_to(bottoms, tops.shape)


def two_level_percentile(
    rng: np.random.Generator, tops: Floats, bottoms: Floats, num_resamples: int
) -> tuple[float, float]:
    """Resample runs and then, in each of them, prompts; the middle 95 % of the ratios."""
    num_runs, num_prompts = tops.shape
    runs = rng.integers(0, num_runs, (num_resamples, num_runs, 1))
    prompts = rng.integers(0, num_prompts, (num_resamples, num_runs, num_prompts))
    ratios = tops[runs, prompts].sum(axis=(1, 2)) / bottoms[runs, prompts].sum(axis=(1, 2))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def show(*cells: str) -> None:
    """A line of a table."""
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
