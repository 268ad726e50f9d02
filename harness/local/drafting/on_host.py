"""A model or a head as a drafter that is told on the host what was decided, as reading a given text does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.local.decoding.protocols import Drafter, Proposal, Step, TensorDrafter, TokenRows
from harness.local.decoding.state import RowState
from harness.local.decoding.transfer import padded


class OnHost(Drafter):
    """Keeps the rows of one batch that a `TensorDrafter` follows, as a loop keeps its own."""

    def __init__(self, drafter: TensorDrafter) -> None:
        self.layers = drafter.layers
        self._drafter = drafter

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        self._drafter.start(prompts, first_tokens, step)
        self._rows = RowState.resting(len(prompts), 1, "cpu")
        for row, (prompt, token) in enumerate(zip(prompts, first_tokens, strict=True)):
            self._rows.begin(row, prompt, token, most=1, uniforms=self._rows.uniforms[row])

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        return self._drafter.draft(self._rows, uniforms)

    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        tokens = torch.tensor(padded(decided, least=step.logits.shape[1]))
        self._rows.advance(tokens, torch.tensor(num_accepted))
        if step.hidden is not None:
            self._drafter.learn(step.hidden)
        self._rows.longest += 1 + max(num_accepted)
        self._drafter.keep([count + 1 for count in num_accepted])

    def select(self, rows: Sequence[int]) -> None:
        self._drafter.select(rows)
        self._rows = self._rows.select(rows)


def on_host(drafter: Drafter | TensorDrafter) -> Drafter:
    """Return a drafter that proposes and observes on the host, which its own may do already."""
    return OnHost(drafter) if isinstance(drafter, TensorDrafter) else drafter
