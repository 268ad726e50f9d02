"""The pages about many runs: a page for the real measurements of each command, one for runs with made-up figures, and
one for runs without a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from harness.commands.command import Command
from harness.config.amounts import counted
from harness.reporting.names import named_runs
from harness.reporting.page import Page
from harness.reporting.table import Column, Table, times
from harness.results.runs import Run, grouped, measured_of
from harness.results.schema import ComparedRow
from harness.results.statistics.interval import Interval
from harness.results.verdict import verdict_of


def pages_about(
    commands: Iterable[Command[Any, Any]], runs: Sequence[Run], failures: Sequence[Run]
) -> dict[str, Page]:
    """The pages. Those of real measurements are found by the question that each answers, or by the command's name if it
    has no question; those of made-up figures under `Made up`, and of runs without a verdict under `Without a verdict`.

    Args:
        commands: the commands whose runs are shown.
        runs: the runs whose figures are shown. If the figures of all are made up, their pages are like those of real
            measurements (`measured_of`).
        failures: runs without a full result, which are listed with their reasons. If such a run has figures, it is in
            `runs`, too.
    """
    measured = set(measured_of(runs))
    pages = {}
    made_up: list[Page] = []
    without_verdict: list[Run] = []
    for command in commands:
        runs_of_command = [run for run in runs if type(run.last) is command.row]
        for is_measured, alike in grouped(runs_of_command, measured.__contains__).items():
            page = command.page(alike)
            if page is None:
                continue
            without_verdict += page.without_verdict
            if is_measured:
                pages[command.question or command.name] = page
                continue
            # Made-up figures allow no conclusion, so only the tables of these runs are shown.
            for part in page.parts or [page]:
                # A page of runs that all ended early has no table.
                for table in (part.full_tables or part.tables)[:1]:
                    title = f"{command.name}: {part.title}"
                    rows = tuple(replace(row, strong=False, faint=True) for row in table.rows)
                    made_up.append(Page(title, tables=[replace(table, rows=rows)]))
    if made_up:
        title = "random weights, synthetic acceptance or made-up costs: no measurement of a pair"
        pages["Made up"] = Page(title, parts=made_up)
    without_verdict = [*dict.fromkeys([*without_verdict, *failures])]
    if without_verdict:
        number = sum(run.times for run in without_verdict)
        title = f"{counted(number, 'run')}, each with its reason"
        table = _without_verdict_table(without_verdict, [*runs, *failures])
        pages["Without a verdict"] = Page(title, tables=[table])
    return pages


def _without_verdict_table(runs: Sequence[Run], among: Sequence[Run]) -> Table:
    """A table of runs without a verdict, each with the reason, under a name that no other run in `among` has. Runs may
    occur twice in `among`.
    """
    columns = (
        Column("command", text=True, of="run.command", varies=True),
        Column("pair", text=True, of="name.cell"),
        Column("K", of="name.k", optional=True),
        Column("why", text=True, of="run", form=_why),
        Column("speed-up\nin this run", form=times, of=_estimate, optional=True).at("run"),
        Column("run", text=True, of="run.id"),
    )
    named = [each for each in named_runs([*dict.fromkeys(among)]) if each.run in runs]
    return Table.of("unjudged", "", named, columns, faint=lambda each: True)


def _why(run: Run[Any]) -> str:
    """The reason why a run has no verdict: `interrupted: stopped by the user`, `no interval from fewer than 8
    prompts`.
    """
    if run.status == "ok":
        return verdict_of(run.last).why
    return f"{run.status.replace('_', ' ')}: {run.reason}"


def _estimate(run: Run[Any]) -> float | None:
    """The speed-up over the prompts that were measured; None if it is unknown, or the row has no speed-up."""
    interval = verdict_of(run.last).interval if isinstance(run.last, ComparedRow) else Interval()
    return interval.estimate if interval.is_known else None
