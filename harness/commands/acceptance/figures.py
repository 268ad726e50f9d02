"""The drafts of runs of `acceptance`, each with its name and its best K, for pages and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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


class Draft(NamedTuple):
    """A draft on texts.

    Attributes:
        pair, name: among the other runs: `13B with step_100 · ./a/step_100`, and without the target `./a/step_100`.
        best: the row of the K with the highest expected speed-up; without costs that of the largest K.
    """

    pair: str
    name: str
    run: Run[AcceptanceRow]
    best: AcceptanceRow

    @property
    def k(self) -> int:
        return int(self.best.num_draft_tokens or 1)

    @property
    def expected(self) -> tuple[float, float]:
        """What ranks drafts: the speed-up, or tokens per iteration where costs are unknown."""
        return estimate_of(self.best.expected_speedup), estimate_of(self.best.tokens_per_iteration)

    @property
    def texts(self) -> list[AcceptanceTextRow]:
        """The texts with their iterations; [] where the run's file of texts is gone."""
        rows = rows_in(self._directory / TEXTS_FILE, AcceptanceTextRow)
        return [
            text for text in rows if text.run == self.run.id and text.iterations_by_num_draft_tokens
        ]

    @property
    def parts(self) -> list[AcceptancePartRow]:
        """Rows for turns of conversations; [] where the run read none, or its file of them is gone."""
        rows = rows_in(self._directory / PARTS_FILE, AcceptancePartRow)
        return [part for part in rows if part.run == self.run.id]

    @property
    def _directory(self) -> Path:
        return self.run.directory or Path(str(self.best.directory))


def drafts_of(runs: Sequence[Run[AcceptanceRow]]) -> list[Draft]:
    """The drafts of runs, the one of which most is expected first."""
    drafts = []
    for named in named_runs(runs):
        # Drafts of the same name are told apart by their path, which `draft` of the row is already.
        details = [*{**named.name.settings, "draft": ""}.values(), *named.name.circumstances]
        name = " · ".join(filter(None, [str(named.row.draft), *details]))
        pair = " · ".join([named.name.pair, *named.name.details])
        drafts.append(Draft(pair, name, named.run, best_row(named.run.rows)))
    return sorted(drafts, key=lambda draft: draft.expected, reverse=True)


def best_row(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    return max(rows, key=lambda row: (estimate_of(row.expected_speedup), row.num_draft_tokens or 0))


def estimate_of(figure: Interval | None) -> float:
    """The estimate; 0 where there is none."""
    return 0.0 if figure is None else figure.estimate
