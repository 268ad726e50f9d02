"""Decisions after a forward pass of the target: which token follows, or which draft tokens stay.

A loop hands a decision to `Runner.decide` with its inputs, and a prepared runner captures pass and
decision as one call. So that it finds that call again, decisions compare by value and can be
hashed; none of them synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import RowWarp, Warp


class Decision(Protocol):
    """Decides from logits [B, n, V] after each token of an extension, and from further tensors [B,
    ...].
    """

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return tensors [B, ...], computed without waiting for the device."""
        ...

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Return inputs that a call with these logits could have, to capture it with."""
        ...


@dataclass(frozen=True)
class Draw(Decision):
    """Regular decoding: with uniforms [B], the token [B] after the last one."""

    warp: Warp | RowWarp

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        (uniforms,) = inputs
        probabilities = self.warp(logits[:, -1])
        return (inverse_cdf(probabilities, uniforms),)

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        return (torch.full(logits.shape[:1], 0.5, device=logits.device),)


class Figures(NamedTuple):
    """All that the host must know of the verdict over one row. Those of all rows are packed, so
    that one copy brings them to the host.
    """

    num_accepted: int
    next_token: int
    num_finite: int  # draft tokens before the first whose probability under the target is nan
    num_finite_drafted: int  # the same, under the drafter
    draft_tokens: list[int]

    @staticmethod
    def pack(verdict: Verdict, draft_tokens: Tensor) -> Tensor:
        """Return whole numbers [B, 4 + K]: the figures of each row, in the order above."""
        probabilities = torch.stack([verdict.target_probability, verdict.draft_probability], dim=1)
        is_finite = probabilities == probabilities  # only nan differs from itself
        num_finite = is_finite.cumprod(-1, dtype=torch.int64).sum(-1)
        decided = torch.stack([verdict.num_accepted, verdict.next_token], dim=1)
        return torch.cat([decided, num_finite, draft_tokens], dim=1)

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> Figures:
        """Name the numbers of a packed row."""
        num_accepted, next_token, num_finite, num_finite_drafted, *draft_tokens = numbers
        return cls(num_accepted, next_token, num_finite, num_finite_drafted, draft_tokens)


@dataclass(frozen=True)
class Judge(Decision):
    """Speculative decoding: warp and verify.

    The inputs are draft tokens [B, K], the two uniforms of an `Offer`, the draft's probabilities
    unless it is deterministic, and the lengths of the rows' offers if they are ragged. The outputs
    are packed `Figures`, and the probabilities [B, K] of each draft token under the target and
    under the drafter.
    """

    warp: Warp | RowWarp
    verification: Callable[[Offer], Verdict]
    lenience: float = 1.0
    is_deterministic: bool = False
    is_ragged: bool = False

    def __call__(self, logits: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        draft_tokens, accept_uniforms, next_uniforms, *others = inputs
        draft_probabilities = None if self.is_deterministic else others[0]
        lengths = others[-1] if self.is_ragged else None
        offer = Offer(
            target_probabilities=self.warp(logits),
            draft_tokens=draft_tokens,
            draft_probabilities=draft_probabilities,
            accept_uniforms=accept_uniforms,
            next_uniforms=next_uniforms,
            lenience=self.lenience,
            lengths=lengths,
        )
        verdict = self.verification(offer)
        figures = Figures.pack(verdict, draft_tokens)
        return figures, verdict.target_probability, verdict.draft_probability

    def examples(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of whole offers: ragged ones are not prepared."""
        num_rows, width, vocabulary_size = logits.shape
        draft_tokens = logits.new_zeros((num_rows, width - 1), dtype=torch.long)
        halves = logits.new_full((num_rows, width), 0.5, dtype=torch.float32)
        inputs = (draft_tokens, halves[:, 1:], halves)
        if self.is_deterministic:
            return inputs
        share = 1 / vocabulary_size
        return *inputs, torch.full_like(logits[:, 1:], share, dtype=torch.float32)
