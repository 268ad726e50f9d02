"""Planted faults take what `verify` takes: a draft without probabilities, and rows that were offered fewer tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.decoding.rules import verify_block
from harness.decoding.verify import Offer, Verdict, verify
from harness.decoding.warp import Warp
from harness.engines.local.fault import FAULTS, fault_names, fault_of
from verifiers import arguments


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("fault", fault_names())
def test_a_fault_takes_every_kind_of_draft(
    fault: str, drawn: bool, rule: Callable[[Offer], Verdict]
) -> None:
    target, tokens, draft, *numbers = arguments(2000, 2)
    lengths = torch.arange(2000) % 3
    offer = Offer(target, tokens, draft if drawn else None, *numbers, lengths=lengths)
    verdict, honest = fault_of(fault).verification(rule, Warp(0.5, 0, 1.0))(offer), rule(offer)
    assert (verdict.num_accepted <= lengths).all()
    same = torch.equal(verdict.next_token, honest.next_token)
    # All but the first are mistakes elsewhere than in the verification.
    in_batches = {name for name, one in FAULTS.all().items() if one.only_in_batches}
    elsewhere = {"none", "lenience", "rollback_off_by_one", *in_batches}
    assert same is (fault in elsewhere - {"argmax_beyond_two_rows"})
    if fault == "residual_warped_twice" and not drawn:
        recovered = verdict.num_accepted < lengths
        rejected = tokens[recovered, verdict.num_accepted[recovered]]
        assert (verdict.next_token[recovered] != rejected).all()
