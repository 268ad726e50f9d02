from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes import MarkovRunner
from harness.engines.divergence import Divergence, first_divergence
from harness.engines.protocol import Margin

CHAIN = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]])


class FakeEngine:
    vocabulary_size = 3

    def margin(self, token_ids: list[int], wanted: int, other: int) -> Margin:
        logits = MarkovRunner(CHAIN).start([token_ids]).logits[0]
        return Margin(float(logits[wanted] - logits[other]), 0.25)


ENGINE: Any = FakeEngine()


def test_equal_texts_do_not_part() -> None:
    assert first_divergence(ENGINE, [0], [1, 2, 0], [1, 2, 0]) is None


def test_the_first_difference_comes_with_its_margin() -> None:
    found = first_divergence(ENGINE, [0], [1, 2, 0, 1], [1, 2, 1, 2])
    assert found is not None
    assert (found.position, found.expected, found.actual) == (2, 0, 1)
    assert found.logit_margin == pytest.approx(torch.tensor(0.5 / 0.25).log().item())
    assert found.logit_tolerance == 0.25


def test_a_text_that_ends_earlier_parts_there() -> None:
    assert first_divergence(ENGINE, [0], [1, 2], [1]) == Divergence(1, 2, -1)


def test_without_a_reference_there_is_a_place_and_no_margin() -> None:
    assert first_divergence(None, [0], [1, 2, 0], [1, 1, 0]) == Divergence(1, 2, 1)
