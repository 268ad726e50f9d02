"""The column `runner`: the names of the runners of a pair."""

from __future__ import annotations

from typing import NamedTuple


class RunnerNames(NamedTuple):
    """The runners of the target and of what drafts.

    As text `static`, or `graphs+eager` where they differ; a draft without a runner has the
    target's.
    """

    target: str
    draft: str

    def __str__(self) -> str:
        return self.target if self.draft == self.target else f"{self.target}+{self.draft}"

    @classmethod
    def parse(cls, text: str) -> RunnerNames:
        """The names in a cell of the column."""
        target, _, draft = text.partition("+")
        return cls(target, draft or target)
