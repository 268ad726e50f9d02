"""Where texts would have ended: no reader sees what a model writes after that, and it may be easier
or harder to draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.acceptance import Acceptance
from harness.results.row import pooled
from harness.results.schema import MaybeFloat

if TYPE_CHECKING:
    from harness.engines.requests import RequestRecord


@dataclass(frozen=True, kw_only=True)
class Ends(Group):
    """Acceptance before and after the ends of an arm's texts.

    A rate is None without iterations that are known to have begun there. Answers whose iterations
    have no known place are left out of both.
    """

    share_after_end: MaybeFloat = pooled(
        "mean", "share of the tokens that came after the end of their text, with `ignore_eos`"
    )
    acceptance_rate_before_end: MaybeFloat = pooled(
        "mean", "`acceptance_rate` of iterations that began before the end of the text"
    )
    acceptance_rate_after_end: MaybeFloat = pooled("mean", "the same after it")

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        if not run.end_tokens:
            return cls()
        within: list[tuple[int, int]] = []
        after: list[tuple[int, int]] = []
        num_tokens = 0
        num_tokens_after = 0
        for request in arm.answered:
            text_length = _text_length(request.token_ids, run.end_tokens)
            num_tokens += len(request.token_ids)
            num_tokens_after += len(request.token_ids) - text_length
            num_within = _num_within(request, text_length)
            if num_within is None:
                continue
            within += request.outcomes[:num_within]
            after += request.outcomes[num_within:]
        return cls(
            share_after_end=num_tokens_after / num_tokens if num_tokens else None,
            acceptance_rate_before_end=Acceptance.of(within).acceptance_rate,
            acceptance_rate_after_end=Acceptance.of(after).acceptance_rate,
        )


def _text_length(token_ids: Sequence[int], end_tokens: Collection[int]) -> int:
    """Number of tokens up to the first that ends the text, this one included; all without one."""
    for position, token in enumerate(token_ids):
        if token in end_tokens:
            return position + 1
    return len(token_ids)


def _num_within(request: RequestRecord, text_length: int) -> int | None:
    """The number of iterations that began before the end of the text, by their first token.

    Tokens 1 2 3 4 END 5 5 5 with outcomes (2, 2), (2, 0), (2, 2): the pass over the prompt gives
    token 1, and the iterations start at positions 1, 4 and 5. The text has 5 tokens, so the first
    two iterations are within it.

    None where the order of the iterations is unknown, or they do not add up to the answer.
    """
    starts = []
    end = 1
    for _, num_accepted in request.outcomes:
        starts.append(end)
        end += num_accepted + 1
    # The answer may have only a part of the last iteration.
    adds_up = bool(starts) and starts[-1] < len(request.token_ids) <= end
    if not (adds_up and request.outcomes_in_order):
        return None
    return sum(start < text_length for start in starts)
