"""DFlash and DSpark against a slow computation without a cache, and their output against `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import VOCABULARY
from chains import GREEDY, request, texts
from fakes import Scripted
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.warp import Warp
from harness.drafting.kinds.dflash import BlockHead
from harness.runners.eager import EagerRunner
from head_references import PROMPTS, Expected, attend, check_against, check_greedy, mlp, rms, spread
from small_heads import block_head, target_model

DSPARK = {"from_anchor": True, "markov_rank": 6, "confidence": True, "confidence_markov": True}


def block_states(
    head: BlockHead, target: PreTrainedModel, last: Tensor, features: Tensor
) -> Tensor:
    """The states [block, D] of one block, after the final norm."""
    size, length = head.config.block_size, len(features)
    context = rms(head.fc(features.flatten(1)), head.hidden_norm)
    queries = torch.cat([last.view(1), torch.full((size - 1,), head.config.mask_token_id)])
    states = target.get_input_embeddings()(queries)
    at, block_at = torch.arange(length + size), torch.arange(length, length + size)
    for layer, window in zip(head.layers, head.windows, strict=True):
        seen = torch.ones(size, length + size, dtype=torch.bool)
        if window is not None:
            seen &= at >= length - window
            if head.config.causal_windows:
                seen &= at <= block_at[:, None]
        x = rms(states, layer.input_layernorm)
        states = states + attend(layer.self_attn, x, torch.cat([context, x]), block_at, at, seen)
        states = states + mlp(layer, rms(states, layer.post_attention_layernorm))
    return rms(states, head.norm)


def block_expected(head: BlockHead, target: PreTrainedModel) -> Expected:
    output = head.lm_head or target.get_output_embeddings()

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        states = block_states(head, target, decided[-1], features)
        logits = output(states if head.config.from_anchor else states[1:])[: len(drawn)]
        if head.markov_head is not None:
            before = torch.cat([decided[-1:], drawn[:-1]])
            logits = (
                logits
                + head.markov_head["markov_w1"].weight[before]
                @ head.markov_head["markov_w2"].weight.T
            )
        return spread(head, logits)

    return expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"style": "llama", "reduced": True},
        {"window": True},
        {"window": True, "causal_windows": True},
        DSPARK,
        {**DSPARK, "reduced": True, "from_anchor": False},
    ],
    ids=[
        "plain",
        "reduced vocabulary",
        "window",
        "causal window",
        "DSpark",
        "DSpark, reduced vocabulary",
    ],
)
def test_distributions_equal_those_without_a_cache(changes: dict[str, Any]) -> None:
    target, head = target_model(), block_head(**changes)
    check_against(target, head.drafter(target, Warp()), block_expected(head, target))


def test_what_is_decided_without_a_proposal_is_read_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.drafting.head_drafter.MOST_UNREAD", 8)
    target, head = target_model(), block_head()
    check_against(
        target,
        head.drafter(target, Warp()),
        block_expected(head, target),
        Scripted([0, 0, 4, 0, 3, 4]),
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("changes", [{}, DSPARK], ids=["DFlash", "DSpark"])
def test_greedy_output_is_that_of_generate(model_type: str, changes: dict[str, Any]) -> None:
    target = target_model(model_type)
    check_greedy(target, block_head(**changes).drafter(target, GREEDY))


@pytest.mark.parametrize(("from_anchor", "most"), [(False, 4), (True, 5)])
def test_a_block_proposes_no_more_than_it_holds(from_anchor: bool, most: int) -> None:
    target, head = target_model(), block_head(from_anchor=from_anchor)
    drafter = head.drafter(target, GREEDY)
    runner = EagerRunner(target, hidden_layers=drafter.layers)
    drafter.start(PROMPTS, [1, 2, 3], runner.start(PROMPTS))
    proposal = drafter.propose(8, torch.zeros(3, 8))
    assert proposal.tokens.shape == (3, most)
    assert proposal.probabilities is not None
    assert proposal.probabilities.shape == (3, most, VOCABULARY)


def test_confidence_shortens_the_offer() -> None:
    target, head = target_model(), block_head(**DSPARK)
    drafter = head.drafter(target, GREEDY, confidence=0.5)
    runner = EagerRunner(target, hidden_layers=drafter.layers)
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


def test_output_with_shortened_offers_is_the_regular_one() -> None:
    target, head = target_model(), block_head(**DSPARK)
    what = request(PROMPTS, GREEDY, length=20)
    drafter = head.drafter(target, GREEDY, confidence=0.5)
    actual = texts(
        speculative(EagerRunner(target, hidden_layers=drafter.layers), drafter, what, 4), 3
    )
    assert actual == texts(autoregressive(EagerRunner(target), what), 3)
