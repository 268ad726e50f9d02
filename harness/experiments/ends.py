"""Where texts would have ended: what a model writes after that is easier to draft, and no reader sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from harness.engines.requests import RequestRecord
from harness.results.acceptance import Acceptance

Outcomes = Sequence[tuple[int, int]]


def end_columns(requests: Iterable[RequestRecord], end_tokens: Collection[int]) -> dict[str, Any]:
    """The columns about tokens after the end of the text, of an arm's answers.

    Args:
        end_tokens: with which the model ends a text.
    """
    before: list[tuple[int, int]] = []
    after: list[tuple[int, int]] = []
    num_tokens = num_after = 0
    for request in requests:
        length = _length_of_text(request.token_ids, end_tokens)
        num_tokens += len(request.token_ids)
        num_after += len(request.token_ids) - length
        first, second = _divided(request, length)
        before += first
        after += second
    return {
        "share_after_end": num_after / num_tokens if num_tokens else None,
        "acceptance_rate_before_end": Acceptance.of(before).acceptance_rate,
        "acceptance_rate_after_end": Acceptance.of(after).acceptance_rate,
    }


def _length_of_text(token_ids: Sequence[int], end_tokens: Collection[int]) -> int:
    """Tokens up to the first that ends the text, which is one of them; all where none does."""
    for place, token in enumerate(token_ids):
        if token in end_tokens:
            return place + 1
    return len(token_ids)


def _divided(request: RequestRecord, length: int) -> tuple[Outcomes, Outcomes]:
    """The iterations that began within the text, and those that began after it; none where that is not told."""
    # The first token belongs to no iteration. Of the last iteration the answer may have a part.
    begins = [1]
    for _, num_accepted in request.outcomes:
        begins.append(begins[-1] + num_accepted + 1)
    total = len(request.token_ids)
    if not request.outcomes or not begins[-2] < total <= begins[-1]:
        return [], []
    num_within = sum(begin < length for begin in begins[:-1])
    return request.outcomes[:num_within], request.outcomes[num_within:]
