"""Domino against torch's own recurrent unit over all drawn tokens at once, and its output against `generate`."""

from __future__ import annotations

import pytest

from block_reference import block_expected
from chains import GREEDY
from harness.local.decoding.warp import Warp
from head_references import check_against, check_greedy
from small_heads import domino_head, head_drafter, target_model


@pytest.mark.parametrize("from_anchor", [False, True])
def test_distributions_equal_those_without_a_cache(from_anchor: bool) -> None:
    target, head = target_model(), domino_head(from_anchor=from_anchor)
    check_against(target, head_drafter(head, target, Warp()), block_expected(head, target))


def test_a_place_too_early_is_noticed() -> None:
    """The mistake of which acceptance lengths of 1.0 were reported: labels taken as not shifted."""
    target, head = target_model(), domino_head(from_anchor=True)
    expected = block_expected(head, target)
    unshifted = domino_head(from_anchor=False)
    unshifted.load_state_dict(head.state_dict())
    with pytest.raises(AssertionError):
        check_against(target, head_drafter(unshifted, target, Warp()), expected)


def test_greedy_output_is_that_of_generate() -> None:
    target = target_model("qwen3")
    check_greedy(target, head_drafter(domino_head(), target, GREEDY))
