"""Measures how often `recovery` calls a lossless engine lossy, and how often it finds each planted fault.

    python benchmarks/recovery_false_alarms.py [--runs 50] [--fault-runs 1] [--draws 2000] [--batch-size 8]
                                               [OVERRIDE ...]

Overrides are settings of `recovery`, such as `model=… draft=…` for a pair other than the tiny one. Each run has its own
seed, and few prompts and tokens (`SMALL`). All other settings have their defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import common

import harness
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import Checks
from harness.results.files import read_rows

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from planted_faults import IN_BATCHES, planted

EVERYWHERE = (
    "BonusFromWrongPosition",
    "DraftProbabilitiesIgnored",
    "ResidualWarpedTwice",
    "RollbackOffByOne",
)

SMALL = ("num_prompts=3", "decoding.max_new_tokens=12", "shift=0.3")


def main() -> None:
    """Run `recovery` on each engine, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_numbers(parser, runs=50, fault_runs=1, draws=2000, batch_size=8)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    batch = f"batch_size={options.batch_size}"
    asked = [*SMALL, f"num_draws={options.draws}", batch, *options.overrides]
    rows = []
    if options.runs:
        rows.append(_tried("local", options.runs, asked))
    if options.fault_runs:
        for fault in (*EVERYWHERE, *IN_BATCHES):
            rows.append(_tried(planted(fault), options.fault_runs, asked))
    common.show(
        f"{options.batch_size} requests in flight, {options.draws:,} draws, {common.versions()}",
        ["fault", "lossy", "smallest p", "largest p", "greedy texts that differ", "s/run"],
        rows,
    )


def _tried(engine: str, num_runs: int, settings: Sequence[str]) -> tuple[object, ...]:
    """Run `recovery` on an engine with several seeds, and return a row of the table."""
    directory = Path(tempfile.mkdtemp())
    file = directory / "recovery.csv"
    started = time.perf_counter()
    for seed in range(num_runs):
        # For a verdict other than lossless, `run` raises an error, but the rows are in the file.
        with contextlib.suppress(harness.HarnessError):
            harness.run(
                "recovery",
                *settings,
                f"engine={engine}",
                f"seed={seed}",
                f"results.file={file}",
                f"hydra.run.dir={directory}/{seed}",
            )
    seconds = time.perf_counter() - started
    runs: dict[str, list[RecoveryRow]] = {}
    for row in read_rows(file, RecoveryRow):
        runs.setdefault(str(row.run), []).append(row)
    verdicts = [Checks(run).verdict for run in runs.values()]
    smallest = [min(row.p_value for row in run if row.p_value is not None) for run in runs.values()]
    differing = [
        (row.num_prompts or 0) - (row.identical_prompts or 0)
        for run in runs.values()
        for row in run
        if row.check == "greedy"
    ]
    row = (
        engine.rpartition(":")[2],
        f"{verdicts.count('lossy')} of {len(verdicts)}",
        f"{min(smallest):.1e}",
        f"{max(smallest):.1e}",
        f"{min(differing)} to {max(differing)}",
        f"{seconds / num_runs:.1f}",
    )
    # Print each row immediately, because the whole table takes long.
    print(*row, sep=" | ", flush=True)
    return row


if __name__ == "__main__":
    main()
