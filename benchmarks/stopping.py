"""Runs that stop when they are precise enough (`precision=`), and races of jobs (`race=true`), in simulation.

Each run draws prompts with replacement from those that a real one has measured. The first table has the coverage of the
intervals of stopped runs, the second how often the best job of a race stays in it, and what is asked of all jobs.

    python -m harness latency num_prompts=40 decoding.temperature=0
    python benchmarks/stopping.py outputs/latency/.../latency_prompts.csv
"""

from __future__ import annotations

import argparse

import common
import numpy as np
import pandas as pd

from harness.results.statistics.arrays import Floats
from harness.results.statistics.ratios import ratio_of_totals
from harness.results.statistics.stopping import (
    CONFIDENCE_OF_LOOKS,
    SHARES,
    eliminated,
    is_precise,
    looks,
    share_of,
)

# True speed-ups of the jobs of a race, as shares of the best one's.
RACES = {
    "12 from 60 %": np.linspace(0.6, 1, 12),
    "12 from 90 %": np.linspace(0.9, 1, 12),
    "one ahead of 11 by 25 %": np.array([0.8] * 11 + [1]),
    "12 equal": np.ones(12),
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    common.add_numbers(parser, runs=1000, most=1024, races=200)
    options = parser.parse_args()
    times = pd.read_csv(options.file).pivot_table(
        index="prompt_index", columns="arm", values="time_ms", sort=False
    )
    regular = times["regular"].to_numpy()
    speculative = times["speculative"].to_numpy()
    precise_runs(regular, speculative, options.runs, options.most)
    races(regular, speculative, options.races)


def precise_runs(regular: Floats, speculative: Floats, num_runs: int, most: int) -> None:
    """How often the intervals of stopped runs cover the truth, and how many prompts they ask."""
    truth = regular.sum() / speculative.sum()
    rng = np.random.default_rng(0)
    rows = []
    for precision in (0.1, 0.05, 0.03, 0.02):
        covered = 0
        asked = []
        for run in range(num_runs):
            drawn = rng.integers(len(regular), size=most)
            for units in looks(most):
                chosen = drawn[:units]
                interval = ratio_of_totals(
                    regular[chosen], speculative[chosen], 1000, run, CONFIDENCE_OF_LOOKS
                )
                if is_precise(interval, precision):
                    break
            covered += interval.low <= truth <= interval.high
            asked.append(units)
        rows.append((f"{precision:.0%}", f"{covered / num_runs:.1%}", f"{np.mean(asked):.1f}"))
    common.show(
        f"{num_runs} runs over {len(regular)} prompts, speed-up {truth:.2f}",
        ["precision", "covered", "prompts"],
        rows,
    )


def races(regular: Floats, speculative: Floats, num_races: int) -> None:
    """How often the best job stays, and which share of the prompts of all jobs is asked."""
    rng = np.random.default_rng(1)
    rows = []
    for name, speeds in RACES.items():
        for num_prompts in (40, 128):
            for deviation in (0.05, 0.15):
                kept = 0
                shares = []
                for _ in range(num_races):
                    drawn = rng.integers(len(regular), size=num_prompts)
                    shape = len(speeds), num_prompts
                    noise = np.exp(rng.normal(0, 0.03, shape))
                    of_regular = regular[drawn] * noise
                    noise = np.exp(rng.normal(0, deviation, shape))
                    of_speculative = speculative[drawn] / speeds[:, None] * noise
                    running = list(range(len(speeds)))
                    num_asked = 0
                    for share in range(1, SHARES + 1):
                        asked = share_of(num_prompts, share)
                        num_asked += len(running) * (asked.stop - asked.start)
                        if share < SHARES and len(running) > 1:
                            upto = slice(asked.stop)
                            left = eliminated(
                                of_regular[running, upto],
                                of_speculative[running, upto],
                                len(speeds),
                            )
                            running = [job for at, job in enumerate(running) if at not in left]
                    kept += int(np.argmax(speeds)) in running
                    shares.append(num_asked / of_regular.size)
                rows.append(
                    (name, num_prompts, f"{deviation:.0%}", f"{kept / num_races:.1%}",
                     f"{np.mean(shares):.0%}", f"{np.quantile(shares, 0.95):.0%}")
                )  # fmt: skip
    common.show(
        f"{num_races} races each, over {len(regular)} prompts",
        ["speed-ups", "prompts", "noise of a prompt", "best stays", "asked", "95 % of races"],
        rows,
    )


if __name__ == "__main__":
    main()
