"""DFlash and DSpark against a slow computation without a cache, and their output against `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from architectures import VOCABULARY
from block_reference import block_expected, block_states
from chains import GREEDY
from harness.local.decoding.warp import Warp
from harness.local.runners.snapshot import SnapshotRunner
from head_references import PROMPTS, check_against, check_greedy
from small_heads import block_head, head_drafter, target_model

DSPARK = {"from_anchor": True, "markov_rank": 6, "confidence": True, "confidence_markov": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"style": "llama", "reduced": True},
        {"window": True},
        {"window": True, "causal_windows": True},
        {"window": True, "causal_windows": True, "windows_follow": True},
        {"causal": True, "window": True, "windows_follow": True},
        DSPARK,
        {**DSPARK, "reduced": True, "from_anchor": False},
    ],
    ids=[
        "plain",
        "reduced vocabulary",
        "window",
        "causal window",
        "causal window of z-lab",
        "JetSpec",
        "DSpark",
        "DSpark, reduced vocabulary",
    ],
)
def test_distributions_equal_those_without_a_cache(changes: dict[str, Any]) -> None:
    target, head = target_model(), block_head(**changes)
    check_against(target, head_drafter(head, target, Warp()), block_expected(head, target))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("changes", [{}, DSPARK], ids=["DFlash", "DSpark"])
def test_greedy_output_is_that_of_generate(model_type: str, changes: dict[str, Any]) -> None:
    target = target_model(model_type)
    check_greedy(target, head_drafter(block_head(**changes), target, GREEDY))


@pytest.mark.parametrize(("from_anchor", "most"), [(False, 4), (True, 5)])
def test_a_block_proposes_no_more_than_it_holds(from_anchor: bool, most: int) -> None:
    target, head = target_model(), block_head(from_anchor=from_anchor)
    drafter = head_drafter(head, target, GREEDY)
    runner = SnapshotRunner(target, hidden_layers=drafter.layers)
    drafter.start(PROMPTS, [1, 2, 3], runner.start(PROMPTS))
    proposal = drafter.propose(8, torch.zeros(3, 8))
    assert proposal.tokens.shape == (3, most)
    assert proposal.probabilities is not None
    assert proposal.probabilities.shape == (3, most, VOCABULARY)


def test_confidence_shortens_the_offer() -> None:
    target, head = target_model(), block_head(**DSPARK)
    drafter = head_drafter(head, target, GREEDY, 0.5)
    runner = SnapshotRunner(target, hidden_layers=drafter.layers)
    step = runner.start(PROMPTS)
    drafter.start(PROMPTS, [1, 2, 3], step)
    proposal = drafter.propose(5, torch.zeros(3, 5))
    assert head.confidence_head is not None
    assert head.markov_head is not None
    for row, (prompt, first) in enumerate(zip(PROMPTS, [1, 2, 3], strict=True)):
        features = step.hidden[row, -len(prompt) :]
        states = block_states(head, target, torch.tensor(first), features)
        before = torch.tensor([first, *proposal.tokens[row, :-1].tolist()])
        known = torch.cat([states, head.markov_head["markov_w1"].weight[before]], dim=1)
        sure = head.confidence_head["proj"](known).squeeze(1) >= 0
        assert proposal.lengths[row] == [*sure.tolist(), False].index(False)
    assert len(set(proposal.lengths)) > 1
