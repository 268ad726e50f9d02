"""Rules of acceptance: which of them say that they are lossless."""

from __future__ import annotations

from typing import ClassVar

import pytest

from harness.config.acceptance_rules import AcceptanceRule


class Honest(AcceptanceRule):
    lossless = True


class HonestWhenDrawn(Honest):
    lossless_greedily: ClassVar[bool | None] = False


@pytest.mark.parametrize(
    ("rule", "greedily", "drawn"),
    [(AcceptanceRule(), False, False), (Honest(), True, True), (HonestWhenDrawn(), False, True)],
)
def test_a_rule_is_greedily_what_it_is_otherwise_unless_it_says_so(
    rule: AcceptanceRule, greedily: bool, drawn: bool
) -> None:
    assert rule.is_lossless(0.0, 0, 1.0) is greedily
    assert rule.is_lossless(0.7, 0, 1.0) is drawn
