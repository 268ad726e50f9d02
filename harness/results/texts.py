"""The rows of a run of `acceptance` in its other files, and which of its K stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from harness.results.files import rows_in
from harness.results.rows.acceptance import AcceptanceCauseRow, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run

AnyRow = TypeVar("AnyRow", AcceptanceTextRow, AcceptanceCauseRow)


def rows_of(run: Run[AcceptanceRow], kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of a run in another of its files; [] where that is gone."""
    directory = run.directory or Path(str(run.last.directory))
    rows = rows_in(directory / f"{kind.kind}.csv", kind)
    return [row for row in rows if row.run == run.id]


def texts_of(run: Run[AcceptanceRow], k: int) -> list[AcceptanceTextRow]:
    """The texts of a run, without those of a damaged file that lack iterations at this K."""
    texts = rows_of(run, AcceptanceTextRow)
    return [text for text in texts if len(text.iterations_by_num_draft_tokens or ()) >= k]


def best_row(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    """The row of the K that the run is about; else of the highest expected speed-up, or without costs of the largest
    K.
    """
    return max(
        rows,
        key=lambda row: (bool(row.is_in_question), expected(row)[0], row.num_draft_tokens or 0),
    )


def expected(row: AcceptanceRow) -> tuple[float, float]:
    """What a draft is expected to gain: by tokens where costs are unknown."""
    figures = (row.expected_speedup, row.tokens_per_iteration)
    speedup, tokens = (0.0 if figure is None else figure.estimate for figure in figures)
    return speedup, tokens
