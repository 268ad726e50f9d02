"""Lessons of a draft: a batch of texts, with the target's distributions over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens further ahead are tested less often: each step counts this much of the one before.
DECAY = 0.8


@dataclass(frozen=True)
class Lesson:
    """A batch of texts, and what the target makes of them.

    Attributes:
        tokens: [B, n], padded on the right.
        counts: [B, n], whether the target's distribution after a token is one to learn: from the last token of the
            prompt to the last but one of the answer.
        wanted: [B, n, V], these distributions.
        hidden: [B, n, L, D], the layers' states that a head reads.
    """

    tokens: Tensor
    counts: Tensor
    wanted: Tensor
    hidden: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in vars(self).values() if tensor is not None)

    def to(self, device: torch.device | str) -> Lesson:
        """The same on another device."""
        hidden = None if self.hidden is None else self.hidden.to(device)
        return Lesson(
            self.tokens.to(device), self.counts.to(device), self.wanted.to(device), hidden
        )

    def features(self) -> Tensor:
        """The hidden states side by side [B, n, L * D], in float32."""
        assert self.hidden is not None
        return self.hidden.flatten(2).float()

    def loss(
        self, logits: Tensor, ahead: int, first: int = 0, tokens: Tensor | None = None
    ) -> Tensor:
        """Cross-entropy of logits [B, n, V of the draft], whose entry i predicts what follows token i + ahead.

        Args:
            first: entries before this one do not count.
            tokens: of the target [V of the draft], where the draft knows some of them alone.
        """
        end = self.tokens.shape[1] - ahead
        return soft_loss(
            logits[:, first:end],
            self.wanted[:, first + ahead :],
            self.counts[:, first + ahead :],
            tokens,
        )


def soft_loss(
    logits: Tensor, wanted: Tensor, counts: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy of logits [..., V] against probabilities [..., V] where `counts` [...]."""
    if tokens is not None:
        wanted = wanted[..., tokens]
    logits = logits[..., : wanted.shape[-1]]
    each = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    return (each * counts).sum() / counts.sum().clamp(min=1)
