"""The draft model's own cache stays right, no matter which part of its proposals is offered and accepted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, autoregressive, chain, request, speculative, texts
from fakes import MarkovRunner
from harness.config.errors import RunError
from harness.local.decoding.protocols import Proposal, Step
from harness.local.decoding.verify import Offer, verify
from harness.local.decoding.warp import Warp
from harness.local.drafting.checked import checked_rule, with_checked_shapes
from harness.local.drafting.model import ModelDrafter


class Shortened(ModelDrafter):
    """Offers only some of the tokens, different numbers to the rows, and checks what the draft model has seen."""

    def __init__(self, runner: MarkovRunner, warp: Warp, most: int) -> None:
        super().__init__(runner, warp)
        self.runner, self.most = runner, most
        self.decided: list[list[int]] = []
        self.generator = torch.Generator().manual_seed(0)

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        super().start(prompts, first_tokens, step)
        self.decided = [
            [*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)
        ]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        self.proposal = super().propose(num_draft_tokens, uniforms)
        lengths = torch.randint(0, self.most + 1, (len(self.decided),), generator=self.generator)
        return Proposal(self.proposal.tokens, self.proposal.probabilities, lengths.tolist())

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        super().observe(num_accepted, next_tokens, step)
        for row, tokens, count, following in zip(
            self.decided, self.proposal.tokens.tolist(), num_accepted, next_tokens, strict=True
        ):
            row += [*tokens[:count], following]
        for seen, row in zip(self.runner.rows, self.decided, strict=True):
            assert seen == row[: len(seen)]
            assert len(row) - 2 <= len(seen) < len(row)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.decided = [self.decided[row] for row in rows]


@pytest.mark.parametrize("most", [0, 1, 3, 4])
@pytest.mark.parametrize("same", [True, False])
def test_some_of_its_tokens_may_be_offered(most: int, same: bool) -> None:
    target = chain(0)
    drafter = Shortened(
        MarkovRunner(target if same else 0.5 * target + 0.5 * chain(1)), GREEDY, most
    )
    what = request(RAGGED, length=40, stop=[8])
    iterations = list(speculative(MarkovRunner(target), drafter, what, 4))
    assert texts(iterations, 3) == texts(autoregressive(MarkovRunner(target), what), 3)
    accepted = {count for iteration in iterations for count in iteration.num_accepted}
    assert max(accepted) == most or not same


# Drafters and rules of the user's own ---------------------------------------------------------------------------------

SIZE = 20
TOKENS = torch.zeros(1, 1, dtype=torch.long)
EVEN = torch.full((1, 1, SIZE), 1 / SIZE)


def proposed(make: Callable[[], Any]) -> Proposal:
    """What comes out of the checks, of one row that is asked for up to four tokens."""
    own: Any = SimpleNamespace(layers=(), propose=lambda num_draft_tokens, uniforms: make())
    return with_checked_shapes(own, "./mine.py:Mine").propose(4, torch.full((1, 4), 0.01))


def raise_(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [TOKENS], "must return a Proposal, not list"),
        (lambda: Proposal(TOKENS.float()), "must give tokens as a tensor of int64"),
        (lambda: Proposal(TOKENS.expand(1, 9)), "tokens [1, at most 4], not [1, 9]"),
        (lambda: Proposal(TOKENS, EVEN[0]), "must give probabilities [1, 1, 'vocabulary'], not [1, 20]"),
        (lambda: raise_(KeyError("lost")), "raised KeyError: 'lost'"),
    ],
)  # fmt: skip
def test_a_wrong_proposal(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(
        RunError, match=rf"^draft=\./mine\.py:Mine: propose\(\) .*{re.escape(words)}"
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
    return Offer(target, tokens, None, torch.zeros(2, 4), torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_accepted": torch.tensor([4])}, "must give a num_accepted of shape [2], not [1]"),
        (None, "must return a Verdict, not NoneType"),
    ],
)
def test_a_wrong_verdict(changes: dict[str, Tensor] | None, words: str) -> None:
    def rule(offer: Offer) -> Any:
        return None if changes is None else dataclasses.replace(verify(offer), **changes)

    with pytest.raises(RunError, match=rf"^decoding.rule=Mine: verify\(\) .*{re.escape(words)}"):
        checked_rule(rule, "Mine")(offer())


def test_a_right_verdict_passes() -> None:
    assert checked_rule(verify, "Mine")(offer()).num_accepted.tolist() == [4, 4]
