"""Simulates runs that stop when they are precise enough (`precision=`), and prints the coverage of their intervals.

Each simulated run draws prompts with replacement from the prompts that a real run has measured.

    python -m harness latency num_prompts=40 decoding.temperature=0
    python benchmarks/stopping.py outputs/latency/.../latency_prompts.csv
"""

from __future__ import annotations

import argparse

import common
import numpy as np
import pandas as pd

from harness.results.statistics import Floats
from harness.results.statistics.ratios import ratio_of_totals
from harness.results.statistics.stopping import (
    CONFIDENCE_OF_LOOKS,
    is_precise,
    looks,
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    common.add_numbers(parser, runs=1000, most=1024)
    options = parser.parse_args()
    times = pd.read_csv(options.file).pivot_table(
        index="prompt_index", columns="arm", values="time_ms", sort=False
    )
    regular = times["regular"].to_numpy()
    speculative = times["speculative"].to_numpy()
    precise_runs(regular, speculative, options.runs, options.most)


def precise_runs(regular: Floats, speculative: Floats, num_runs: int, most: int) -> None:
    """Print, for several precisions, how often the intervals of stopped runs contain the true speed-up, and how many
    prompts the runs send on average.

    Args:
        regular, speculative: the times of both arms, by prompt.
        most: the most prompts of a simulated run.
    """
    truth = regular.sum() / speculative.sum()
    rng = np.random.default_rng(0)
    rows = []
    for precision in (0.1, 0.05, 0.03, 0.02):
        covered = 0
        asked = []
        for _ in range(num_runs):
            drawn = rng.integers(len(regular), size=most)
            for units in looks(most):
                chosen = drawn[:units]
                interval = ratio_of_totals(
                    [regular[chosen]], [speculative[chosen]], confidence=CONFIDENCE_OF_LOOKS
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


if __name__ == "__main__":
    main()
