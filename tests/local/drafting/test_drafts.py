"""Drafts of transformers alone, and checks of drafters and rules of the user's own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config.errors import RunError
from harness.local.decoding.protocols import Proposal
from harness.local.decoding.verify import Offer, verify
from harness.local.drafting.checked import CheckedDrafter, checked_rule
from harness.local.drafting.method import EarlyExit, EarlyExitSettings
from tiny_checkpoints import as_checkpoint, make_config
from verifiers import offer_of


@pytest.mark.parametrize(
    ("total", "asked", "layers"), [(32, None, 8), (3, None, 1), (24, (12,), 12)]
)
def test_a_quarter_of_the_layers_draft_unless_it_is_said(
    total: int, asked: tuple[int, ...] | None, layers: int
) -> None:
    target = as_checkpoint(make_config("llama", num_hidden_layers=total))
    settings = EarlyExitSettings(name="early_exit", method="early_exit", layers=asked)
    planned: Any = EarlyExit().plan(settings, target, None).settings
    assert planned.layers == (layers,)


# Drafters and rules of the user's own ---------------------------------------------------------------------------------

SIZE = 20
TOKENS = torch.zeros(1, 1, dtype=torch.long)
EVEN = torch.full((1, 1, SIZE), 1 / SIZE)


def proposed(make: Callable[[], Any]) -> Proposal:
    """What comes out of the checks, of one row that is asked for up to four tokens."""
    own: Any = SimpleNamespace(layers=(), propose=lambda num_draft_tokens, uniforms: make())
    return CheckedDrafter(own, "./mine.py:Mine").propose(4, torch.full((1, 4), 0.01))


def raise_(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [TOKENS], "'list' object has no attribute 'tokens'"),
        (lambda: Proposal(TOKENS.expand(1, 9)), "tokens of shape [1, 9], not [1, 4]"),
        (lambda: Proposal(TOKENS, EVEN[0]), "probabilities of shape [1, 20], not [1, 1, 20]"),
        (lambda: raise_(KeyError("lost")), "KeyError: 'lost'"),
    ],
)  # fmt: skip
def test_a_wrong_proposal(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(
        RunError, match=rf"^draft=\./mine\.py:Mine: propose\(\): .*{re.escape(words)}"
    ):
        proposed(make)


def test_a_right_proposal_passes() -> None:
    proposal = Proposal(TOKENS, EVEN)
    assert proposed(lambda: proposal) is proposal


def offer() -> Offer:
    """Of two rows of four tokens, all accepted."""
    target = torch.zeros(2, 5, SIZE)
    target[:, :, 0] = 1
    tokens = torch.zeros(2, 4, dtype=torch.long)
    return offer_of(target, tokens, None, torch.zeros(2, 4), torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_accepted": torch.tensor([4])}, "num_accepted of shape [1], not [2]"),
        (None, "'NoneType' object has no attribute"),
    ],
)
def test_a_wrong_verdict(changes: dict[str, Tensor] | None, words: str) -> None:
    def rule(offer: Offer) -> Any:
        return None if changes is None else dataclasses.replace(verify(offer), **changes)

    with pytest.raises(RunError, match=rf"^decoding.rule=Mine: verify\(\): .*{re.escape(words)}"):
        checked_rule(rule, "Mine")(offer())


def test_a_right_verdict_passes() -> None:
    assert checked_rule(verify, "Mine")(offer()).num_accepted.tolist() == [4, 4]
