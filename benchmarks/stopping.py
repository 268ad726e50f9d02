"""Coverage of intervals of runs that stop when they are precise enough, and how many prompts these ask.

Draws times of prompts as they were measured on the tiny pair: each run draws prompts with replacement from a
latency_prompts.csv, and stops as `latency precision=` does.

    python -m harness latency num_prompts=40 decoding.temperature=0
    python benchmarks/stopping.py outputs/latency/.../latency_prompts.csv
"""

from __future__ import annotations

import argparse

import common
import numpy as np
import pandas as pd

from harness.results.statistics.ratios import ratio_of_totals
from harness.results.statistics.stopping import CONFIDENCE_OF_LOOKS, is_precise, looks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    common.add_numbers(parser, runs=1000, most=1024)
    options = parser.parse_args()
    table = pd.read_csv(options.file).pivot_table(
        index="prompt_index", columns="arm", values="time_ms"
    )
    regular = table["regular"].to_numpy()
    speculative = table["speculative"].to_numpy()
    truth = regular.sum() / speculative.sum()
    rng = np.random.default_rng(0)
    rows = []
    for precision in (0.1, 0.05, 0.03, 0.02):
        covered = 0
        asked = []
        for run in range(options.runs):
            drawn = rng.integers(len(regular), size=options.most)
            for units in looks(options.most):
                chosen = drawn[:units]
                interval = ratio_of_totals(
                    regular[chosen], speculative[chosen], 1000, run, CONFIDENCE_OF_LOOKS
                )
                if is_precise(interval, precision):
                    break
            covered += interval.low <= truth <= interval.high
            asked.append(units)
        rows.append((f"{precision:.0%}", f"{covered / options.runs:.1%}", f"{np.mean(asked):.1f}"))
    common.show(
        f"{options.runs} runs over {len(regular)} prompts, speed-up {truth:.2f}",
        ["precision", "covered", "prompts"],
        rows,
    )


if __name__ == "__main__":
    main()
