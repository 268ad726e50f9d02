"""Figures that the pages and pictures of `acceptance` take from its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.reporting.names import named_runs
from harness.results.files import rows_in
from harness.results.rows.acceptance import (
    PARTS_FILE,
    TEXTS_FILE,
    AcceptancePartRow,
    AcceptanceRow,
    AcceptanceTextRow,
)
from harness.results.runs import Run
from harness.results.statistics.interval import Interval


def best_row(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    """The row of the K with the highest expected speed-up; without costs that of the largest K."""
    return max(rows, key=lambda row: (estimate_of(row.expected_speedup), row.num_draft_tokens or 0))


def estimate_of(figure: Interval | None) -> float:
    """The estimate; 0 where there is none."""
    return 0.0 if figure is None else figure.estimate


def texts_of(run: Run[AcceptanceRow]) -> list[AcceptanceTextRow]:
    """The texts of a run with their iterations; [] where its file of texts is gone."""
    rows = rows_in(_directory(run) / TEXTS_FILE, AcceptanceTextRow)
    return [text for text in rows if text.run == run.id and text.iterations_by_num_draft_tokens]


def part_rows_of(run: Run[AcceptanceRow]) -> list[AcceptancePartRow]:
    """The parts of a run's conversations; [] where it read none, or its file of them is gone."""
    rows = rows_in(_directory(run) / PARTS_FILE, AcceptancePartRow)
    return [part for part in rows if part.run == run.id]


def _directory(run: Run[AcceptanceRow]) -> Path:
    return run.directory or Path(str(run.last.directory))


def curve_names(runs: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """Runs by target, and by what distinguishes them."""
    found: dict[str, dict[str, Run]] = {}
    for named in named_runs(runs):
        # Drafts of the same name are told apart by their path, which `draft` of the row is already.
        settings = {**named.name.settings, "draft": ""}
        details = [*filter(None, settings.values()), *named.name.circumstances]
        name = " · ".join([str(named.row.draft), *details])
        found.setdefault(str(named.row.model), {})[name] = named.run
    return found
