"""The draft model's own cache stays right, no matter which part of its proposals is offered and accepted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, autoregressive, chain, request, speculative, texts
from fakes import MarkovRunner
from harness.local.decoding.protocols import Proposal, Step
from harness.local.decoding.warp import Warp
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
