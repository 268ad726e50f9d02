"""Batches of texts that drafts are trained on, with the target's distributions over them.

`losses.py` makes them of the target's own answers, for `distill`; the loss of each kind of head reads
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The weight of the loss of each further draft token, as a share of the one before: verification
# reaches later draft tokens less often.
DECAY = 0.8


@dataclass(frozen=True)
class TrainingBatch:
    """A batch of texts, and what the target computes over them.

    Attributes:
        tokens: [B, n], padded on the right.
        is_learned: [B, n], whether the target's distribution after a token is to be learned: true
            from the last token of the prompt to the last but one token of the answer.
        target_probabilities: [B, n, V], the target's distribution after each token.
        hidden: [B, n, L, D], the states of the L layers that a head reads; None for a draft model.
    """

    tokens: Tensor
    is_learned: Tensor
    target_probabilities: Tensor
    hidden: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in vars(self).values() if tensor is not None)

    def to(self, device: torch.device | str) -> TrainingBatch:
        """Copy the batch to another device."""
        return TrainingBatch(
            tokens=self.tokens.to(device),
            is_learned=self.is_learned.to(device),
            target_probabilities=self.target_probabilities.to(device),
            hidden=None if self.hidden is None else self.hidden.to(device),
        )

    def features(self) -> Tensor:
        """Return the hidden states of all layers side by side [B, n, L * D], in float32."""
        assert self.hidden is not None
        return self.hidden.flatten(2).float()

    def loss(
        self, logits: Tensor, ahead: int, first: int = 0, known_tokens: Tensor | None = None
    ) -> Tensor:
        """Return the mean cross-entropy of logits [B, m, V of the draft].

        Entry i of the logits learns the target's distribution after token i + `ahead`: with
        ahead=1, entry 0 learns the one after token 1, which is of token 2.

        Args:
            first: entries before this one do not count.
            known_tokens: [V of the draft], the target's tokens that the draft has; None for all.
        """
        end = max(0, self.tokens.shape[1] - ahead)
        return soft_loss(
            logits[:, first:end],
            self.target_probabilities[:, first + ahead :],
            self.is_learned[:, first + ahead :],
            known_tokens,
        )


def soft_loss(
    logits: Tensor,
    target_probabilities: Tensor,
    weights: Tensor,
    known_tokens: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy of logits [..., V of the draft], with weights [...].

    Args:
        target_probabilities: [..., V], the distributions to be learned.
        known_tokens: as of `TrainingBatch.loss`. What the target gives to other tokens is not
            learned.
    """
    if known_tokens is not None:
        target_probabilities = target_probabilities[..., known_tokens]
    # Outputs beyond the vocabulary only pad the matrix.
    logits = logits[..., : target_probabilities.shape[-1]]
    each = -(target_probabilities * logits.float().log_softmax(-1)).sum(-1)
    return (each * weights).sum() / weights.sum().clamp(min=1)
