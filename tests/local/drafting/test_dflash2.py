"""DFlash 2 against a slow computation without a cache, and its output against `generate`."""

from __future__ import annotations

from typing import Any

import pytest

from chains import GREEDY
from harness.local.decoding.warp import Warp
from head_references import check_against, check_greedy
from selector_reference import path_expected
from small_heads import head_drafter, selector_head, target_model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": True},
        {"window": True, "windows_follow": True, "causal_windows": True},
    ],
    ids=["plain", "window of speculators", "causal window of z-lab"],
)
def test_distributions_equal_those_without_a_cache(changes: dict[str, Any]) -> None:
    target, head = target_model(), selector_head(**changes)
    check_against(target, head_drafter(head, target, Warp()), path_expected(head, target))


def test_greedy_output_is_that_of_generate() -> None:
    target = target_model()
    check_greedy(target, head_drafter(selector_head(), target, GREEDY))
