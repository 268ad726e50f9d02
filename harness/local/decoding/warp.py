"""Turns logits into probabilities, for the target and for every drafter alike, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.local.decoding.transfer import to_device


@dataclass(frozen=True)
class Warp:
    """Temperature, then top-k, then top-p, in the order transformers applies them.

    `temperature=0` is greedy: the distribution is one-hot on the likeliest token, the first one on
    a tie. `top_k=0` and `top_p=1` change nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        """Turn logits [..., V] of any type into float32 probabilities [..., V]; nan where a logit
        is nan or inf.
        """
        logits = logits.float()
        if self.temperature == 0:
            largest, likeliest = logits.max(-1, keepdim=True)
            # 0, or nan like the softmax of logits that are not finite.
            zero = 0 * largest
            return zero.expand_as(logits).clone().scatter_(-1, likeliest, zero + 1)
        if self.temperature != 1:
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest_kept = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            descending, order = probabilities.sort(dim=-1, descending=True, stable=True)
            top_p = max(self.top_p, 1e-30)  # less is 0 in float32
            # A token stays if the mass of all likelier ones has not reached top_p yet; so the
            # likeliest always stays.
            likelier_mass = descending.cumsum(-1) - descending
            kept = torch.empty_like(likelier_mass, dtype=torch.bool).scatter_(
                -1, order, likelier_mass < top_p
            )
            probabilities = probabilities * kept
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities


class BatchWarp:
    """The warp of a running batch, with one for each row of logits [B, ..., V]. A loop sets the rows
    as they join and leave, and its drafter shares it.

    Attributes:
        rows: the warp of each row.
        common: the warp of all rows; None where they differ.
    """

    rows: Sequence[Warp] = ()
    common: Warp | None = None

    def set_rows(self, rows: Sequence[Warp]) -> None:
        """Take a warp for each row."""
        self.rows = rows
        self.common = rows[0] if len(set(rows)) == 1 else None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.common is not None:
            return self.common(logits)
        members: dict[Warp, list[int]] = {}
        for row, warp in enumerate(self.rows):
            members.setdefault(warp, []).append(row)
        probabilities = torch.empty_like(logits, dtype=torch.float32)
        for warp, rows in members.items():
            index = to_device(rows, logits.device)
            probabilities[index] = warp(logits[index])
        return probabilities


AnyWarp = Warp | BatchWarp
