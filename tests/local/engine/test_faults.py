"""Planted faults take what `verify` takes: a draft without probabilities, and rows that were offered fewer tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from harness.config.faults import fault_names
from harness.local.decoding.verify import Offer, Verdict, verify, verify_block
from harness.local.decoding.warp import Warp
from harness.local.engine.fault import fault_of
from harness.local.engine.logprobs import Burst
from planted_faults import IN_BATCHES, OF_LOGPROBS, planted
from verifiers import arguments

OTHERS = ("Lenience", *IN_BATCHES, *OF_LOGPROBS)


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("fault", [*fault_names(), *map(planted, OTHERS)])
def test_a_fault_takes_every_kind_of_draft(
    fault: str, drawn: bool, rule: Callable[[Offer], Verdict]
) -> None:
    target, tokens, draft, *numbers = arguments(2000, 2)
    lengths = torch.arange(2000) % 3
    offer = Offer(target, tokens, draft if drawn else None, *numbers, lengths=lengths)
    verdict, honest = fault_of(fault).verdict(rule, offer, Warp(0.5, 0, 1.0)), rule(offer)
    assert (verdict.num_accepted <= lengths).all()
    same = torch.equal(verdict.next_token, honest.next_token)
    # All but the first are mistakes elsewhere than in the verification.
    elsewhere = {"none", "rollback_off_by_one", *map(planted, OTHERS)}
    assert same is (fault in elsewhere - {planted("ArgmaxBeyondTwoRows")})
    if fault == "residual_warped_twice" and not drawn:
        recovered = verdict.num_accepted < lengths
        rejected = tokens[recovered, verdict.num_accepted[recovered]]
        assert (verdict.next_token[recovered] != rejected).all()


def test_log_probabilities_of_a_burst_and_each_mistake_in_them() -> None:
    warp = Warp(0.5, 2, 1.0)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tokens = [1, 0, 5]
    burst = Burst(logits, tokens, num_top=2, warp=warp, draft_probabilities=[0.25, 0.0])
    raw = logits.log_softmax(-1)
    honest = [float(raw[place, token]) for place, token in enumerate(tokens)]
    drawn = warp(logits).log().clamp(min=-9999)
    expected = {
        "none": honest,
        planted("Lenience"): honest,
        planted("LogprobsOfDraft"): [math.log(0.25), -9999, honest[2]],
        planted("LogprobsOfPreviousPosition"): [honest[0], float(raw[0, 0]), float(raw[1, 5])],
        planted("LogprobsAfterTemperature"): [
            float(drawn[place, one]) for place, one in enumerate(tokens)
        ],
        planted("LogprobsMissingInBursts"): honest[2:],
        planted("LogprobsZero"): [0.0, 0.0, 0.0],
    }
    for fault, values in expected.items():
        found = fault_of(fault).logprobs(burst)
        assert [one.logprob for one in found] == pytest.approx(values), fault
        places = [2] if fault == planted("LogprobsMissingInBursts") else [0, 1, 2]
        assert [(one.place, one.token) for one in found] == [(one, tokens[one]) for one in places]
    likeliest = raw[1].topk(2)
    top = list(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
    assert [token for token, _ in burst.logprobs()[1].top] == [token for token, _ in top]
    assert [one for _, one in burst.logprobs()[1].top] == pytest.approx([one for _, one in top])
    assert burst.logprobs()[1].rank == 1 + int((raw[1] > raw[1, 0]).sum())
