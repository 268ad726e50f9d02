"""What follows a forward pass of the target: functions of its logits, which a runner can prepare with the pass.

Each is equal to any other that decides the same, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.decoding.randomness import inverse_cdf
from harness.decoding.verify import Offer, Verdict
from harness.decoding.warp import Warp


class Decision(Protocol):
    """Decides from logits [B, n, V] after each token of an extension, and from further tensors [B, ...]."""

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Tensors [B, ...], computed here."""
        ...

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Inputs that a call with these logits could have."""
        ...


@dataclass(frozen=True)
class Draw(Decision):
    """Regular decoding: with uniforms [B], the token [B] after the last one."""

    warp: Warp

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (inverse_cdf(self.warp(logits[:, -1]), *inputs),)

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        return (torch.full(logits.shape[:1], 0.5, device=logits.device),)


@dataclass(frozen=True)
class Judge(Decision):
    """Speculative decoding: warp and verify.

    Its inputs are draft tokens [B, K], the uniforms of an `Offer`, and the draft's probabilities unless it is
    deterministic. It gives figures [B, 4 + K], which are all that the host must know, and the probabilities [B, K] of
    a `Verdict`. The figures are num_accepted, next_token, of target and draft the number of draft tokens before the
    first whose probability is nan, and the draft tokens.
    """

    warp: Warp
    verification: Callable[[Offer], Verdict]
    lenience: float = 1.0
    is_deterministic: bool = False

    def __call__(
        self, logits: Tensor, *inputs: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        draft_tokens, accept_uniforms, next_uniforms, *probabilities = inputs
        draft_probabilities = None if self.is_deterministic else probabilities[0]
        offer = Offer(
            self.warp(logits),
            draft_tokens,
            draft_probabilities,
            accept_uniforms,
            next_uniforms,
            self.lenience,
            lengths,
        )
        verdict = self.verification(offer)
        chosen = torch.stack([verdict.target_probability, verdict.draft_probability], dim=1)
        num_sound = (
            (chosen == chosen).cumprod(-1, dtype=torch.int64).sum(-1)
        )  # only nan differs from itself
        decided = torch.stack([verdict.num_accepted, verdict.next_token], dim=1)
        return torch.cat([decided, num_sound, draft_tokens], dim=1), *chosen.unbind(1)

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        num_rows, width, size = logits.shape
        halves = torch.full((num_rows, width), 0.5, device=logits.device)
        draft_tokens = torch.zeros(num_rows, width - 1, dtype=torch.long, device=logits.device)
        uniform = torch.full((num_rows, width - 1, size), 1 / size, device=logits.device)
        return draft_tokens, halves[:, 1:], halves, *([] if self.is_deterministic else [uniform])
