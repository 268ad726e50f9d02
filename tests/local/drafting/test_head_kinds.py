"""Every kind of head against a slow computation without a cache, and what is particular to some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from architectures import VOCABULARY
from block_reference import block_expected, block_states
from chains import GREEDY
from eagle_reference import eagle_expected
from fakes import Scripted
from harness.local.decoding.protocols import Proposal
from harness.local.decoding.warp import AnyWarp, Warp
from harness.local.drafting.heads.head import Head
from harness.local.runners.snapshot import SnapshotRunner
from head_references import PROMPTS, Expected, check_against
from medusa_reference import medusa_expected
from selector_reference import path_expected
from small_heads import (
    WINDOW,
    block_head,
    domino_head,
    eagle_head,
    head_drafter,
    layer_config,
    medusa_head,
    selector_head,
    target_model,
)

DSPARK = {"from_anchor": True, "markov_rank": 6, "confidence": True, "confidence_markov": True}
FOLLOWS = {"window": True, "windows_follow": True}
FEWER = {"reduced": True, "norm_before_residual": True, "norm_before_fc": True}
EAGLE_31 = {"fc_norm": True, "norm_output": True, "own_embedding": False, "own_output": False}


def eagle(style: str = "llama", num_layers: int = 1, **changes: Any) -> Callable[[], Head]:
    own = changes.pop("own", {})
    return lambda: eagle_head(layer_config(style, num_layers, **own), **changes)


KINDS: dict[str, tuple[Callable[..., Expected], Callable[[], Any]]] = {
    "EAGLE-3": (eagle_expected, eagle()),
    "EAGLE-3, reduced vocabulary": (eagle_expected, eagle(**FEWER)),
    "EAGLE-3.1, the target's vocabulary": (eagle_expected, eagle("qwen3", **EAGLE_31)),
    "EAGLE-3, second layer with a window": (eagle_expected, eagle("qwen3", 2, own=WINDOW)),
    "P-EAGLE": (eagle_expected, eagle(num_layers=3, mask_token_id=96, reduced=True)),
    "DFlash": (block_expected, block_head),
    "DFlash, reduced vocabulary": (
        block_expected,
        lambda: block_head(style="llama", reduced=True),
    ),
    "DFlash, window": (block_expected, lambda: block_head(window=True)),
    "DFlash, causal window": (
        block_expected,
        lambda: block_head(window=True, causal_windows=True),
    ),
    "DFlash, causal window of z-lab": (
        block_expected,
        lambda: block_head(causal_windows=True, **FOLLOWS),
    ),
    "JetSpec": (block_expected, lambda: block_head(causal=True, **FOLLOWS)),
    "DSpark": (block_expected, lambda: block_head(**DSPARK)),
    "DSpark, reduced vocabulary": (
        block_expected,
        lambda: block_head(**DSPARK | {"reduced": True, "from_anchor": False}),
    ),
    "DFlash 2": (path_expected, selector_head),
    "DFlash 2, window of speculators": (path_expected, lambda: selector_head(window=True)),
    "DFlash 2, causal window of z-lab": (
        path_expected,
        lambda: selector_head(causal_windows=True, **FOLLOWS),
    ),
    "Domino": (block_expected, domino_head),
    "Domino, from its anchor": (block_expected, lambda: domino_head(from_anchor=True)),
    "Medusa": (medusa_expected, lambda: medusa_head(True)),
    "Medusa, the target's output": (medusa_expected, lambda: medusa_head(False)),
}


@pytest.mark.parametrize("name", KINDS)
def test_distributions_equal_those_without_a_cache(name: str) -> None:
    expected, make_head = KINDS[name]
    target, head = target_model(), make_head()
    drafter = head_drafter(head, target, Warp())
    check_against(target, drafter, expected(head, target))


@pytest.mark.parametrize("name", ["EAGLE-3", "P-EAGLE", "DFlash"])
def test_what_is_decided_without_a_proposal_is_read_as_well(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.local.drafting.heads.drafter.MOST_UNREAD", 8)
    expected, make_head = KINDS[name]
    target, head = target_model(), make_head()
    drafter = head_drafter(head, target, Warp())
    check_against(target, drafter, expected(head, target), Scripted([0, 0, 4, 0, 3, 4]))


def test_a_token_too_early_is_noticed() -> None:
    """The mistake of which acceptance lengths of 1.0 were reported: labels taken as not shifted."""
    target, head = target_model(), domino_head(from_anchor=True)
    expected = block_expected(head, target)
    unshifted = domino_head(from_anchor=False)
    unshifted.load_state_dict(head.state_dict())
    with pytest.raises(AssertionError):
        check_against(target, head_drafter(unshifted, target, Warp()), expected)


def proposed(head: Head, warp: AnyWarp, most: int, threshold: float = 0.0) -> tuple[Proposal, Any]:
    """What a head drafts after `PROMPTS`, and the target's step."""
    target = target_model()
    drafter = head_drafter(head, target, warp, threshold)
    step = SnapshotRunner(target, hidden_layers=drafter.layers).start(PROMPTS)
    drafter.start(PROMPTS, [1, 2, 3], step)
    return drafter.propose(most, torch.full((3, most), 0.99)), step


@pytest.mark.parametrize(
    ("head", "most"),
    [
        (block_head(from_anchor=False), 4),
        (block_head(from_anchor=True), 5),
        (medusa_head(False, num_heads=2), 2),
    ],
    ids=["masks", "anchor", "Medusa"],
)
def test_no_more_is_proposed_than_a_pass_predicts(head: Head, most: int) -> None:
    proposal, _ = proposed(head, GREEDY, 8)
    assert proposal.tokens.shape == (3, most)
    assert proposal.probabilities is not None
    assert proposal.probabilities.shape == (3, most, VOCABULARY)


def test_confidence_shortens_the_offer() -> None:
    head: Any = block_head(**DSPARK)
    proposal, step = proposed(head, GREEDY, 5, threshold=0.5)
    assert proposal.lengths is not None
    for row, (prompt, first) in enumerate(zip(PROMPTS, [1, 2, 3], strict=True)):
        features = step.hidden[row, -len(prompt) :]
        states = block_states(head, target_model(), torch.tensor(first), features)
        before = torch.tensor([first, *proposal.tokens[row, :-1].tolist()])
        known = torch.cat([states, head.markov_head["markov_w1"].weight[before]], dim=1)
        sure = head.confidence_head["proj"](known).squeeze(1) >= 0
        assert proposal.lengths[row] == [*sure.tolist(), False].index(False)
    assert len(set(proposal.lengths)) > 1


@pytest.mark.parametrize("warp", [GREEDY, Warp()])
def test_no_token_is_drawn_that_does_not_exist(warp: Warp) -> None:
    head = medusa_head(True)
    with torch.no_grad():
        head.get_submodule("1.2").weight.fill_(torch.nan)
    proposal, _ = proposed(head, warp, 4)
    assert int(proposal.tokens.max()) < VOCABULARY
    assert proposal.probabilities is not None
    assert proposal.probabilities[:, 1].isnan().all()
