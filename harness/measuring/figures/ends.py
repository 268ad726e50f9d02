"""How much of an arm's texts comes after their ends: no reader sees that, and it may be easier or harder to draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import Ratio, pooled
from harness.results.schema import MaybeFloat


@dataclass(frozen=True, kw_only=True)
class EndFigures(Group):
    """How much of an arm's texts comes after their ends."""

    share_after_end: MaybeFloat = pooled(
        Ratio(over="num_tokens"),
        "share of the tokens that came after the end of their text, with `ignore_eos`",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        # Text that a server sent does not have the token that ends it.
        answers = [request.token_ids for request in arm.answered if not request.from_text]
        num_tokens = sum(map(len, answers))
        if not run.end_tokens or not num_tokens:
            return cls()
        num_within = sum(_text_length(token_ids, run.end_tokens) for token_ids in answers)
        return cls(share_after_end=1 - num_within / num_tokens)


def _text_length(token_ids: Sequence[int], end_tokens: Collection[int]) -> int:
    """Number of tokens up to the first that ends the text, this one included; all without one."""
    for position, token in enumerate(token_ids):
        if token in end_tokens:
            return position + 1
    return len(token_ids)
