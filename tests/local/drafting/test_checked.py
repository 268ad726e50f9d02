"""Drafters, texts and rules of the user's own: a mistake is one line that names them and the call."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config.errors import RunError
from harness.local.decoding.protocols import Drafter, Proposal
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.drafting.checked import CheckedDrafter, CheckedText
from harness.local.drafting.text import Text
from harness.local.engine.rules import CheckedRule

SIZE = 20
TOKENS = torch.zeros(1, 1, dtype=torch.long)
EVEN = torch.full((1, 1, SIZE), 1 / SIZE)


class Scripted(Drafter):
    """Proposes whatever it is told to."""

    layers = ()

    def __init__(self, make: Callable[[], Any]) -> None:
        self.propose = lambda num_draft_tokens, uniforms: make()  # type: ignore[method-assign]

    def start(self, prompts: Sequence[Any], first_tokens: Sequence[int], step: Any) -> None: ...
    def add(self, prompts: Sequence[Any], first_tokens: Sequence[int], step: Any) -> None: ...
    def observe(self, num_accepted: Any, next_tokens: Any, step: Any) -> None: ...
    def select(self, rows: Sequence[int]) -> None: ...


def proposed(make: Callable[[], Any]) -> Proposal:
    """What comes out of the checks, of one row that is asked for up to four tokens."""
    drafter = CheckedDrafter(Scripted(make), "./mine.py:Mine", SIZE)
    drafter.start([[1]], [2], None)  # type: ignore[arg-type]
    return drafter.propose(4, torch.full((1, 4), 0.01))


def raise_(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [TOKENS], "must return a Proposal, not list"),
        (lambda: Proposal(TOKENS.float()), "must give tokens as a tensor of int64"),
        (lambda: Proposal(TOKENS.expand(1, 9)), "tokens [1, at most 4], not [1, 9]"),
        (lambda: Proposal(TOKENS + SIZE), f"tokens outside the vocabulary of {SIZE}"),
        (lambda: Proposal(TOKENS, None, [7]), "lengths from 0 to 1, one per row, not [7]"),
        (lambda: Proposal(TOKENS, None, [0.5]), "lengths from 0 to 1, one per row, not [0.5]"),  # type: ignore[list-item]
        (lambda: Proposal(TOKENS, EVEN[..., :7]), f"must give probabilities [1, 1, {SIZE}]"),
        (lambda: Proposal(TOKENS, EVEN * 2), "no distributions: each must be at least 0, their sum 1"),
        (lambda: Proposal(TOKENS + 3, EVEN), "its probabilities and the uniforms do not draw"),
        (lambda: raise_(KeyError("lost")), "raised KeyError: 'lost'"),
    ],
)  # fmt: skip
def test_a_wrong_proposal(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(
        RunError, match=rf"^draft=\./mine\.py:Mine: propose\(\) .*{re.escape(words)}"
    ):
        proposed(make)


def test_a_right_proposal_passes_and_what_is_not_offered_is_not_read() -> None:
    for proposal in (Proposal(TOKENS, EVEN), Proposal(TOKENS, EVEN * 0, [0])):
        assert proposed(lambda given=proposal: given) is proposal  # type: ignore[misc]


class ScriptedText(Text):
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def extend(self, tokens: Iterable[int]) -> None:
        tokens.sort(2)  # type: ignore[attr-defined]

    def continuation(self, most: int) -> Any:
        return self.make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: None, "must return a list of tokens, not NoneType"),
        (lambda: (token for token in [1]), "must return a list of tokens, not generator"),
        (lambda: [1, 1.5], "must give tokens as whole numbers, not 1.5"),
        (lambda: [SIZE], f"gives tokens outside the vocabulary of {SIZE}"),
        (lambda: {}[0], "raised KeyError: 0"),
    ],
)
def test_a_wrong_continuation(make: Callable[[], Any], words: str) -> None:
    text = CheckedText(ScriptedText(make), "./mine.py:Mine", SIZE)
    with pytest.raises(RunError, match=rf"^draft=\./mine\.py:Mine: continuation\(\) {words}"):
        text.continuation(4)
    with pytest.raises(RunError, match=r"extend\(\) raised TypeError"):
        text.extend([1])


def offer() -> Offer:
    """Of two rows of four tokens, all accepted."""
    target = torch.zeros(2, 5, SIZE)
    target[:, :, 0] = 1
    tokens = torch.zeros(2, 4, dtype=torch.long)
    return Offer(target, tokens, None, torch.zeros(2, 4), torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_accepted": torch.tensor([4])}, "must give a num_accepted of shape [2], not [1]"),
        ({"next_token": torch.zeros(2)}, "must give whole numbers as next_token"),
        ({"next_token": torch.tensor([0, SIZE])}, f"the token {SIZE}, outside the vocabulary"),
        ({"num_accepted": torch.tensor([5, 4])}, "must accept 0 to 4 of 4 draft tokens, not 5"),
        (None, "must return a Verdict, not NoneType"),
    ],
)
def test_a_wrong_verdict(changes: dict[str, Tensor] | None, words: str) -> None:
    def rule(offer: Offer) -> Any:
        return None if changes is None else dataclasses.replace(verify(offer), **changes)

    with pytest.raises(RunError, match=rf"^decoding.rule=Mine: verify\(\) .*{re.escape(words)}"):
        CheckedRule("Mine", rule, reads_values=True)(offer())


def test_a_right_verdict_passes_and_numbers_are_read_only_when_asked() -> None:
    right = CheckedRule("Mine", verify, reads_values=True)(offer())
    assert right.num_accepted.tolist() == [4, 4]

    def too_many(offer: Offer) -> Verdict:
        return dataclasses.replace(verify(offer), num_accepted=torch.tensor([5, 5]))

    assert CheckedRule("Mine", too_many)(offer()).num_accepted.tolist() == [5, 5]
