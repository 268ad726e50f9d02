"""What the two kinds of hybrids have in common, `hybrid` and `hybrid_trees`: a drafter that reads
the text, and another one.

Both drafters follow all rows, whichever of them proposes. A record of each row tells how good its
text has been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from harness.decoding.protocols import Drafter, Step
from harness.drafting.text import TextDrafter

# What a hybrid remembers of a row, and the kind of drafter beside the text's.
Record = TypeVar("Record")
Other = TypeVar("Other", bound=Drafter)


class BesideText(Drafter, Generic[Record, Other]):
    """Two drafters that follow the same rows, and a record of each row.

    `observe` says how many tokens of a proposal were kept, not which. So a subclass tells each of
    the two what was proposed in the end, before `observe`: the text by `TextDrafter.replace`, the
    other by `FollowingDrafter.replace`, or by `TreeDrafter.follow` after a tree.

    Args:
        text: proposes what the row's text says.
        other: the drafter beside it.
        least: with fewer tokens than this, `text` is to propose nothing.
        new_record: makes the record of a row.
    """

    reads_verdicts = True  # as every text does

    def __init__(
        self, text: TextDrafter, other: Other, least: int, new_record: Callable[[], Record]
    ) -> None:
        text.least = least
        self._text = text
        self.other = other
        self.layers = tuple(other.layers)
        self._new_record = new_record

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._records = [self._new_record() for _ in prompts]
        self._text.start(prompts, first_tokens, step)
        self.other.start(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._records += [self._new_record() for _ in prompts]
        self._text.add(prompts, first_tokens, step)
        self.other.add(prompts, first_tokens, step)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        self._text.observe(num_accepted, next_tokens, step)
        self.other.observe(num_accepted, next_tokens, step)

    def select(self, rows: Sequence[int]) -> None:
        self._records = [self._records[row] for row in rows]
        self._text.select(rows)
        self.other.select(rows)
