"""Planted faults take what `verify` takes: a draft without probabilities, and rows that were offered fewer tokens."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from harness.config.settings import FAULTS_UNDER_LOAD, Fault
from harness.decoding.rules import verify_block
from harness.decoding.verify import Offer, verify
from harness.decoding.warp import Warp
from harness.engines.local.faults import Verification, faulty_verification
from verifiers import arguments


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("fault", get_args(Fault))
def test_a_fault_takes_every_kind_of_draft(fault: Fault, drawn: bool, rule: Verification) -> None:
    target, tokens, draft, *numbers = arguments(2000, 2)
    lengths = torch.arange(2000) % 3
    offer = Offer(target, tokens, draft if drawn else None, *numbers, lengths=lengths)
    verdict, honest = faulty_verification(fault, Warp(0.5, 0, 1.0), rule)(offer), rule(offer)
    assert (verdict.num_accepted <= lengths).all()
    same = torch.equal(verdict.next_token, honest.next_token)
    # All but the first are mistakes elsewhere than in the verification.
    elsewhere = {"none", "lenience", "rollback_off_by_one", *FAULTS_UNDER_LOAD}
    assert same is (fault in elsewhere - {"argmax_beyond_two_rows"})
    if fault == "residual_warped_twice" and not drawn:
        recovered = verdict.num_accepted < lengths
        rejected = tokens[recovered, verdict.num_accepted[recovered]]
        assert (verdict.next_token[recovered] != rejected).all()
