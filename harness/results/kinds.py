"""The kinds of row that this project writes, and which of them a file holds."""

from __future__ import annotations

from collections.abc import Iterable

from harness.results.row import Row
from harness.results.rows.compare import CompareRow
from harness.results.rows.distill import DistillRow
from harness.results.rows.eval import AnswerRow, EvalRow
from harness.results.rows.latency import LatencyPromptRow, LatencyRow
from harness.results.rows.map import MapRow
from harness.results.rows.plan import PlanRow
from harness.results.rows.recovery import RecoveryRow

# The kinds that this project writes; a command from elsewhere brings its own.
KINDS: list[type[Row]] = [
    LatencyRow,
    EvalRow,
    RecoveryRow,
    CompareRow,
    DistillRow,
    PlanRow,
    MapRow,
    LatencyPromptRow,
    AnswerRow,
]


def kind_of(header: Iterable[str], kinds: Iterable[type[Row]] = KINDS) -> type[Row] | None:
    """The kind of the rows in a file with these columns; None for a file of none of these kinds."""
    columns = set(header)
    fitting = [kind for kind in kinds if columns.issuperset(("run", *kind.recognised_by))]
    # Some add columns to others.
    return max(fitting, key=lambda kind: len(kind.columns()), default=None)
