"""Medusa heads against the formula, and their output against `generate`."""

from __future__ import annotations

import pytest
import torch

from architectures import VOCABULARY
from chains import GREEDY
from harness.local.decoding.warp import Warp
from harness.local.runners.snapshot import SnapshotRunner
from head_references import PROMPTS, check_against, check_greedy
from medusa_reference import medusa_expected
from small_heads import head_drafter, medusa_head, target_model


@pytest.mark.parametrize("own_outputs", [True, False])
def test_distributions_are_those_of_the_formula(own_outputs: bool) -> None:
    target, head = target_model(), medusa_head(own_outputs)
    check_against(target, head_drafter(head, target, Warp()), medusa_expected(head, target))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_greedy_output_is_that_of_generate(model_type: str) -> None:
    target = target_model(model_type)
    check_greedy(target, head_drafter(medusa_head(True), target, GREEDY))


def test_there_are_no_more_tokens_than_heads() -> None:
    target, head = target_model(), medusa_head(False, num_heads=2)
    drafter = head_drafter(head, target, GREEDY)
    drafter.start(
        PROMPTS, [1, 2, 3], SnapshotRunner(target, hidden_layers=drafter.layers).start(PROMPTS)
    )
    assert drafter.propose(4, torch.zeros(3, 4)).tokens.shape == (3, 2)


@pytest.mark.parametrize("warp", [GREEDY, Warp()])
def test_no_token_is_drawn_that_does_not_exist(warp: Warp) -> None:
    target, head = target_model(), medusa_head(True)
    with torch.no_grad():
        head.get_submodule("1.2").weight.fill_(torch.nan)
    drafter = head_drafter(head, target, warp)
    drafter.start(
        PROMPTS, [1, 2, 3], SnapshotRunner(target, hidden_layers=drafter.layers).start(PROMPTS)
    )
    proposal = drafter.propose(4, torch.full((3, 4), 0.99))
    assert int(proposal.tokens.max()) < VOCABULARY
    assert proposal.probabilities is not None
    assert proposal.probabilities[:, 1].isnan().all()
