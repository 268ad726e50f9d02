"""How often do the intervals of `repeats=5` contain the long-run speed-up?

    python benchmarks/repeats_coverage.py --repetitions 40 --repeats 5
    python benchmarks/repeats_coverage.py --from results.csv               # the same, from runs measured before

All runs are measured first, each in a new process; the mean of the logs of their speed-ups is the
long-run value. Then they are pooled in the order measured, `repeats` at a time. To compare, the
intervals of the single runs are counted as well. Beside a load: start another measurement before.
At least 90 % of the pooled intervals should contain the value, which they helped to determine: with
40 repetitions that favours them by little.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import harness
from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from harness.results.pooling import pooled_rows


def main() -> None:
    """Measure, pool, and print how many intervals contain the long-run value."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--from", dest="file", type=Path, help="a latency.csv with such runs")
    options = parser.parse_args()
    file = options.file or measure(options)
    print(f"the runs are in {file}")
    runs: dict[str, list[LatencyRow]] = {}
    for row in read_rows(file, LatencyRow):
        if row.repeat != "all" and row.status == "ok":
            runs.setdefault(str(row.run), []).append(row)
    in_order = [rows for _, rows in sorted(runs.items()) if len(rows) == 2]
    logs = [math.log(rows[-1].values()["speedup"] or 1) for rows in in_order]
    value = math.exp(sum(logs) / len(logs))
    print(f"{len(in_order)} runs; the long-run speed-up is {value:.4f}×")
    size = options.repeats
    groups = [in_order[first : first + size] for first in range(0, len(in_order) - size + 1, size)]
    report("single runs", [rows[-1] for rows in in_order], value)
    report(f"repeats={size}", [pooled_rows(group)[-1] for group in groups], value)


def measure(options: argparse.Namespace) -> Path:
    """Measure all runs as one command; returns the file with their rows."""
    file = Path(tempfile.mkdtemp()) / "latency.csv"
    harness.run(
        "latency",
        f"repeats={options.repetitions * options.repeats}",
        f"results.file={file}",
        f"hydra.sweep.dir={tempfile.mkdtemp()}",
        num_prompts=options.prompts,
        decoding={"max_new_tokens": options.tokens},
        resume=False,
    )
    return file


def report(name: str, rows: Sequence[LatencyRow], value: float) -> None:
    """Print how many intervals of these rows contain the value."""
    speedups = [row.speedup for row in rows if row.speedup is not None and row.speedup.has_bounds]
    inside = sum(not speedup.excludes(value) for speedup in speedups)
    print(f"{name}: {inside} of {len(speedups)} intervals contain it")


if __name__ == "__main__":
    main()
