"""The interface of a command's measurement, without torch, so that a command can be one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from harness.results.schema import RunRow
    from harness.tables.table import Answer, Document


class Experiment(Protocol):
    """A command's measurement, the class that its record names (`menu/command.py`).

    Attributes:
        settings: those given, with the command's own changes, checked early and without models.
    """

    settings: Any

    def measure(self, session: Any) -> None:
        """Measure, with the `Session` of `experiments/session.py`.

        If anything ends this early, earlier measurements are kept.
        """

    def rows(self, session: Any) -> Sequence[RunRow]:
        """The rows of all measurements so far; rows that say so where there are none."""

    def document(self, rows: Sequence[Any]) -> Answer:
        """The answer to print; none by default, or where nothing was measured."""
        return []

    def details(self, rows: Sequence[Any]) -> Document:
        """The figures behind the answer: in `summary.txt`, and printed with `details=true`."""
        return []

    def judge(self, rows: Sequence[Any]) -> None:
        """Raise a VerdictError for a run that succeeded and whose answer is not the good one; by default any is."""
        return
