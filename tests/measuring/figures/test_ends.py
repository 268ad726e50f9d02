"""Tokens after the end of a text."""

from __future__ import annotations

from typing import Any

import pytest

from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.measuring.figures.texts import EndFigures
from measured_runs import figures

END = 9


def answer(token_ids: list[int], **known: Any) -> RequestRecord:
    return RequestRecord(0, 3, token_ids=token_ids, num_tokens=len(token_ids), **known)


def share_after_end(request: RequestRecord) -> float | None:
    answered = [Answered(requests=[request], seconds=0.0)]
    return figures(EndFigures, answered, end_tokens={END}).share_after_end


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [([1, 2, 3], 0), ([END, 5, 5, 5], 3 / 4), ([1, 2, 3, 4, END, 5, 5, 5], 3 / 8), ([], None)],
)
def test_tokens_after_the_end_are_a_share_of_all(token_ids: list[int], share: float | None) -> None:
    assert share_after_end(answer(token_ids)) == share
    sent = answer(token_ids, from_text=True)
    assert share_after_end(sent) is None, "text has no token that ends it"
