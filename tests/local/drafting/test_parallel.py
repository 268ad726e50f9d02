"""A parallel draft model drafts what one plain pass over the text and masks gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import VOCABULARY, random_model
from chains import request
from fakes import Scripted
from harness.config.errors import SettingError
from harness.local.decoding.protocols import Proposal, Step
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ParallelDrafter, checked_mask
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from head_references import PROMPTS
from loops import speculative

MASK = 96


class Watched(ParallelDrafter):
    """Compares every distribution with a pass over the whole text, without a cache."""

    def __init__(self, runner: Any, model: Any, warp: Warp) -> None:
        super().__init__(runner, warp, MASK)
        self.model = model
        self.error = 0.0
        self.rows: list[list[int]] = []
        self.offered: list[list[int]] = []

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        super().start(prompts, first_tokens, step)
        self.rows = [[*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        self.offered = [[] for _ in prompts]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        proposal = super().propose(num_draft_tokens, uniforms)
        assert proposal.probabilities is not None
        self.offered = proposal.tokens.tolist()
        for row, probabilities in zip(self.rows, proposal.probabilities, strict=True):
            read = torch.tensor([[*row, *[MASK] * (num_draft_tokens - 1)]])
            logits = self.model(input_ids=read, use_cache=False).logits[0, len(row) - 1 :]
            error = (probabilities.log() - logits.log_softmax(-1)).abs().max().item()
            self.error = max(self.error, error)
        return proposal

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        decided = zip(self.rows, self.offered, num_accepted, next_tokens, strict=True)
        for row, tokens, count, following in decided:
            row += [*tokens[:count], following]
        self.offered = [[] for _ in self.rows]
        super().observe(num_accepted, next_tokens, step)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.rows = [self.rows[row] for row in rows]
        self.offered = [self.offered[row] for row in rows]


@torch.inference_mode()
@pytest.mark.parametrize("kind", [SnapshotRunner, StaticRunner])
def test_distributions_equal_those_of_one_plain_pass(kind: Any) -> None:
    """In ragged rows that accept different numbers, and after turns without a proposal."""
    target, draft = random_model("llama"), random_model("llama", seed=1)
    with torch.no_grad():
        for model in (target, draft):
            model.get_output_embeddings().weight.mul_(0.15)
    drafter = Watched(kind(draft), draft, Warp())
    what = request(PROMPTS, Warp(), length=30, stop=range(60, 63))
    number = Scripted([4, 4, 0, 0, 2, 4, 0, 4])
    iterations = list(speculative(kind(target), drafter, what, number))
    assert len({len(iteration.rows) for iteration in iterations}) > 1
    assert len({count for iteration in iterations for count in iteration.num_accepted}) >= 2
    assert drafter.error < 1e-4


@pytest.mark.parametrize(("mask", "message"), [(VOCABULARY, "97, is not in"), ("<mask>", "<mask>")])
def test_a_mask_outside_the_vocabulary_is_one_line(mask: Any, message: str) -> None:
    config = random_model("llama").config
    assert checked_mask("draft", config) is None
    config.pard_token = mask
    with pytest.raises(SettingError, match=message):
        checked_mask("draft", config)
