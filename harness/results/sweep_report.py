"""What a sweep says: a line when a job ends, and a table when all have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.results.labels import labels
from harness.results.recovery_report import summarise
from harness.results.report.cells import typed

Row = Mapping[str, Any]


def job_line(command: str, rows: Sequence[Row]) -> str:
    """What became of a job, in a few words."""
    troubled = next((row for row in rows if row["status"] != "ok"), None)
    if troubled is not None:
        return f"{troubled['status']}: {troubled['error']}"
    if command not in _LINES or not rows:
        return "done"
    return ", ".join([_LINES[command](rows), *labels(rows[-1])])


def print_sweep(command: str, rows: Sequence[Row], file: Path, num_jobs: int) -> None:
    """The final table on stdout, and on stderr where the rows are."""
    if rows:
        _TABLES.get(command, _print_plainly)(rows)
    num_done = len({row["job"] for row in rows})
    num_failed = len({row["job"] for row in rows if row["status"] != "ok"})
    again = "; the same command again measures what is missing or failed" if num_failed or num_done < num_jobs else ""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"{num_done} of {num_jobs} jobs in {file}{again}", style="dim", markup=False
    )


def exit_code(command: str, rows: Sequence[Row]) -> int:
    """1 where a job failed or found a loss, else 3 where one could not tell, else 0."""
    if any(row["status"] != "ok" for row in rows):
        return 1
    verdicts = {_recovery(job) for job in _by_job(rows)} if command == "recovery" else set()
    return 1 if "lossy" in verdicts else 3 if "undecided" in verdicts else 0


def _latency(rows: Sequence[Row]) -> str:
    row = rows[-1]
    if not row["speedup"]:
        return f"{float(row['ms_per_token']):.2f} ms/token"
    interval = f" ({float(row['speedup_low']):.2f} to {float(row['speedup_high']):.2f})" if row["speedup_low"] else ""
    return f"{float(row['speedup']):.2f}×{interval}"


def _eval(rows: Sequence[Row]) -> str:
    merged = [row for row in rows if row["seed"] == "all" and row["accuracy"]]
    return ", ".join(f"{row['arm']} {float(row['accuracy']):.1%}" for row in merged)


def _recovery(rows: Sequence[Row]) -> str:
    return summarise([typed(row) for row in rows]).verdict


def _plan(rows: Sequence[Row]) -> str:
    return "fits"


def _print_pairs(rows: Sequence[Row]) -> None:
    from harness.results.report.report import print_pairs

    print_pairs(rows)


def _print_plans(rows: Sequence[Row]) -> None:
    from harness.results.plan_report import print_plans

    print_plans(rows)


def _by_job(rows: Sequence[Row]) -> list[list[Row]]:
    jobs: dict[str, list[Row]] = {}
    for row in rows:
        jobs.setdefault(str(row["job"]), []).append(row)
    return list(jobs.values())


def _print_plainly(rows: Sequence[Row]) -> None:
    """A line for each job: what differs between them, and the outcome."""
    jobs = _by_job(rows)
    settings = [name for name in _SETTINGS if len({str(job[0].get(name)) for job in jobs}) > 1]
    table = Table(*dict.fromkeys(["model", "draft", *settings]), "outcome", box=box.ROUNDED)
    command = "recovery" if "verdict" in rows[0] else "eval"
    for job in jobs:
        table.add_row(
            *(str(job[0].get(name) or "") for name in dict.fromkeys(["model", "draft", *settings])),
            job_line(command, job),
        )
    Console(highlight=False).print(table)


_SETTINGS = (
    "num_draft_tokens temperature top_k top_p lenience fault batch_size seed task operands prompts placement".split()
)
_LINES: dict[str, Callable[[Sequence[Row]], str]] = {
    "latency": _latency,
    "eval": _eval,
    "recovery": _recovery,
    "plan": _plan,
}
_TABLES: dict[str, Callable[[Sequence[Row]], None]] = {"latency": _print_pairs, "plan": _print_plans}
