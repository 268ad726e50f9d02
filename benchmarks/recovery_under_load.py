"""How often `recovery load=8` accuses an honest engine, and how often it finds each fault that only load shows.

    python benchmarks/recovery_under_load.py [--runs 50] [--fault-runs 2] [--draws 4000] [--load 8]
                                             [--single-draws 2000]

Each run has its own seed. Every fault is also looked for by plain `recovery` with single requests (`batch_size=1`),
which should not find it. Of the command's defaults only the number of draws and the shift are others.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import common

import harness
from harness.config.settings import FAULTS_UNDER_LOAD
from harness.report.recovery import summarise
from harness.results.files import read_rows
from harness.results.schema import RecoveryRow

SHIFT = 0.1


def main() -> None:
    """Run all of them, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_numbers(parser, runs=50, fault_runs=2, draws=4000, load=8, single_draws=2000)
    options = parser.parse_args()
    loaded = [f"load={options.load}", f"num_draws={options.draws}"]
    single = ["batch_size=1", f"num_draws={options.single_draws}", "num_prompts=5"]
    rows = [_tried("none", "under load", options.runs, loaded)]
    for fault in FAULTS_UNDER_LOAD:
        rows.append(_tried(fault, "under load", options.fault_runs, loaded))
        rows.append(_tried(fault, "single requests", 1, single))
    common.show(
        f"{options.load} requests in flight, {options.draws:,} drawn tokens; single: {options.single_draws:,} draws;"
        f" shift {SHIFT:g}, {common.versions()}",
        ["fault", "asked", "lossy", "smallest p", "largest p", "greedy texts that differ", "s/run"],
        rows,
    )


def _tried(fault: str, asked: str, num_runs: int, settings: Sequence[str]) -> tuple[object, ...]:
    """A row of the table: the verdicts of runs with seeds of their own."""
    directory = Path(tempfile.mkdtemp())
    file = directory / "recovery.csv"
    started = time.perf_counter()
    for seed in range(num_runs):
        # A verdict that is not the good one is an error; its rows are in the file.
        with contextlib.suppress(harness.HarnessError):
            harness.run(
                "recovery",
                *settings,
                f"fault={fault}",
                f"seed={seed}",
                f"shift={SHIFT}",
                f"results.file={file}",
                f"hydra.run.dir={directory}/{seed}",
            )
    seconds = time.perf_counter() - started
    runs: dict[str, list[RecoveryRow]] = {}
    for row in read_rows(file, RecoveryRow):
        runs.setdefault(str(row.run), []).append(row)
    verdicts = [summarise(run).verdict for run in runs.values()]
    smallest = [min(row.p_value for row in run if row.p_value is not None) for run in runs.values()]
    differing = [
        (row.num_prompts or 0) - (row.identical_prompts or 0)
        for run in runs.values()
        for row in run
        if row.check == "greedy"
    ]
    return (
        fault,
        asked,
        f"{verdicts.count('lossy')} of {len(verdicts)}",
        f"{min(smallest):.1e}",
        f"{max(smallest):.1e}",
        f"{min(differing)} to {max(differing)}",
        f"{seconds / num_runs:.1f}",
    )


if __name__ == "__main__":
    main()
