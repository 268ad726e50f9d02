"""Turns logits into probabilities, for the target and for every drafter alike, and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# In float32 a smaller top_p is 0.
_LEAST_TOP_P = 1e-30


@dataclass(frozen=True)
class Warp:
    """Temperature, then top-k, then top-p, in the order transformers applies them.

    `temperature=0` is greedy: the distribution is one-hot on the likeliest token, the first one on
    a tie. `top_k=0` and `top_p=1` change nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def kind(self) -> WarpKind:
        return kind_of([self])

    def __call__(self, logits: Tensor) -> Tensor:
        """Turn logits [..., V] of any type into float32 probabilities [..., V]; nan where a logit
        is nan or inf.
        """
        warp = BatchWarp()
        warp.set_rows([self], logits.device)
        return warp(logits.unsqueeze(0)).squeeze(0)


class WarpKind(NamedTuple):
    """The work that the warps of some rows make: it is the same for all rows, and decided on the host.

    Attributes:
        has_greedy: whether a row takes the likeliest token.
        has_sampled: whether a row does not.
        most_top_k: the largest top-k; 0 for none.
        has_top_p: whether a row has a top-p below 1.
    """

    has_greedy: bool
    has_sampled: bool
    most_top_k: int
    has_top_p: bool


def kind_of(warps: Sequence[Warp]) -> WarpKind:
    """Return the work that these warps make together."""
    sampled = [warp for warp in warps if warp.temperature > 0]
    return WarpKind(
        has_greedy=len(sampled) < len(warps),
        has_sampled=bool(sampled),
        most_top_k=max((warp.top_k for warp in sampled), default=0),
        has_top_p=any(warp.top_p < 1 for warp in sampled),
    )


class BatchWarp:
    """The warp of a running batch, with one for each row of logits [B, ..., V]. A loop sets the rows, and its drafter
    shares it.

    Args:
        num_rows: for which its tensors stay where they are, so that a captured call can read them.
        devices: of these tensors, the target's first; a draft may be on another.
        known: warps that rows may have. The work that these make together is then made for any of them.

    Attributes:
        kind: the work that is made.
    """

    kind: WarpKind = kind_of([Warp()])

    def __init__(
        self,
        num_rows: int = 0,
        devices: Collection[torch.device | str] = (),
        known: Sequence[Warp] = (),
    ) -> None:
        self._known = list(known)
        # Temperature, top-k and top-p of each row, on each device.
        self._fixed = [torch.ones(3, num_rows, device=device) for device in devices]
        self._numbers = self._fixed

    def set_rows(self, warps: Sequence[Warp], device: torch.device | str = "cpu") -> None:
        """Take a warp for each row of logits, on the target's device."""
        self.kind = kind_of(warps)
        if kind_of([*self._known, *warps]) == kind_of(self._known):
            self.kind = kind_of(self._known)
        self._numbers = self._fixed
        if not self._fixed or len(warps) > self._fixed[0].shape[1]:
            self._numbers = [torch.ones(3, len(warps), device=device)]
        columns = [(warp.temperature, warp.top_k, warp.top_p) for warp in warps]
        for numbers in self._numbers:
            for tensor, values in zip(numbers, zip(*columns, strict=True), strict=True):
                if len(set(values)) == 1:
                    # Filling waits for no device; and rows that only fill the batch up get a number, too.
                    tensor.fill_(values[0])
                else:
                    tensor[: len(warps)] = torch.tensor(values, dtype=tensor.dtype)

    def __call__(self, logits: Tensor) -> Tensor:
        kind = self.kind
        logits = logits.float()
        if not kind.has_sampled:
            return _one_hot(logits)
        temperature = self._of_rows(0, logits)
        divisor = temperature
        if kind.has_greedy:
            divisor = temperature.where(temperature > 0, 1)
        scaled = logits / divisor
        if kind.most_top_k:
            scaled = self._cut_top_k(scaled)
        probabilities = scaled.softmax(-1)
        if kind.has_top_p:
            probabilities = self._cut_top_p(probabilities)
        if kind.has_greedy:
            probabilities = probabilities.where(temperature > 0, _one_hot(logits))
        return probabilities

    def _cut_top_k(self, logits: Tensor) -> Tensor:
        top_k = self._of_rows(1, logits).long()
        most = min(self.kind.most_top_k, logits.shape[-1])
        likeliest = logits.topk(most, dim=-1).values
        # A greedy row may have a larger top-k, of no effect.
        place = (top_k - 1).clamp(min=0, max=most - 1).expand(*logits.shape[:-1], 1)
        smallest_kept = likeliest.gather(-1, place)
        return logits.masked_fill((logits < smallest_kept) & (top_k > 0), -torch.inf)

    def _cut_top_p(self, probabilities: Tensor) -> Tensor:
        top_p = self._of_rows(2, probabilities).clamp(min=_LEAST_TOP_P)
        descending, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays if the mass of all likelier ones has not reached top_p yet; so the
        # likeliest always stays.
        likelier_mass = descending.cumsum(-1) - descending
        kept = torch.empty_like(likelier_mass, dtype=torch.bool)
        kept = kept.scatter_(-1, order, likelier_mass < top_p)
        cut = probabilities * kept
        return torch.where(top_p < 1, cut / cut.sum(-1, keepdim=True), probabilities)

    def _of_rows(self, setting: int, logits: Tensor) -> Tensor:
        """Return a setting of each row, in a shape [B, 1, ...] that goes with logits [B, ..., V]."""
        here = [numbers for numbers in self._numbers if numbers.device == logits.device]
        numbers = here[0] if here else self._numbers[0].to(logits.device)
        of_rows = numbers[setting, : len(logits)]
        return of_rows.view(-1, *[1] * (logits.dim() - 1))


def _one_hot(logits: Tensor) -> Tensor:
    """Return distributions that are one-hot on the likeliest token of logits [..., V]."""
    largest, likeliest = logits.max(-1, keepdim=True)
    # 0, or nan like the softmax of logits that are not finite.
    zero = 0 * largest
    return zero.expand_as(logits).clone().scatter_(-1, likeliest, zero + 1)


AnyWarp = Warp | BatchWarp
