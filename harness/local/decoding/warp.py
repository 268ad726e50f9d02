"""Turns logits into probabilities, for the target and for every drafter. No other code does this."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Smaller values of top_p are replaced by this one. A value that is 0 in float32 would keep no token, not even the
# likeliest.
_LEAST_TOP_P = 1e-30


@dataclass(frozen=True)
class Warp:
    """Temperature, top-k and top-p. They are applied in this order, as in transformers.

    `temperature=0` is greedy decoding: the likeliest token has probability 1. If several tokens are equally likely, it
    is the first of them. `top_k=0` and `top_p=1` have no effect.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def kind(self) -> WarpKind:
        return kind_of([self])

    def __call__(self, logits: Tensor) -> Tensor:
        """Turn logits [..., V] of any dtype into float32 probabilities [..., V].

        If one of a distribution's logits is nan or +inf, its probabilities are nan. A token whose logit is -inf has
        probability 0.
        """
        warp = BatchWarp()
        warp.set_rows([self], logits.device)
        return warp(logits.unsqueeze(0)).squeeze(0)


class WarpKind(NamedTuple):
    """The operations that the warps of a batch need.

    All rows run the same operations. They are chosen on the host, so compiled and captured code is made separately for
    each kind.

    Attributes:
        has_greedy: whether any row chooses the likeliest token (temperature 0).
        has_sampled: whether any row samples (temperature above 0).
        most_top_k: the largest top-k of the rows that sample; 0 if none uses top-k.
        has_top_p: whether any row that samples has a top-p below 1.
    """

    has_greedy: bool
    has_sampled: bool
    most_top_k: int
    has_top_p: bool


def kind_of(warps: Sequence[Warp]) -> WarpKind:
    """Return the operations that these warps need together."""
    sampled = [warp for warp in warps if warp.temperature > 0]
    return WarpKind(
        has_greedy=len(sampled) < len(warps),
        has_sampled=bool(sampled),
        most_top_k=max((warp.top_k for warp in sampled), default=0),
        has_top_p=any(warp.top_p < 1 for warp in sampled),
    )


class BatchWarp:
    """The warp of a batch. It applies a separate `Warp` to each row of logits [B, ..., V]. A loop sets the warps of the
    rows (`set_rows`); the loop's drafter uses the same object.

    Args:
        num_rows: batches of up to this many rows use the same tensors, so that a captured call can read them. 0 for no
            such tensors.
        devices: the devices on which these tensors exist, the target's device first. A draft may be on another device.
        known: warps that rows will probably have. If a batch needs no operations beyond those of `known`, it runs
            exactly the operations of `known`. So one prepared call serves all of these warps.

    Attributes:
        kind: the operations that run.
    """

    kind: WarpKind = kind_of([Warp()])

    def __init__(
        self,
        num_rows: int = 0,
        devices: Collection[torch.device | str] = (),
        known: Sequence[Warp] = (),
    ) -> None:
        self._known = list(known)
        # One tensor [3, num_rows] per device: the temperature, top-k and top-p of each row.
        self._fixed = [torch.ones(3, num_rows, device=device) for device in devices]
        self._numbers = self._fixed

    def set_rows(self, warps: Sequence[Warp], device: torch.device | str = "cpu") -> None:
        """Set the warp of each row.

        Args:
            warps: one warp for each row.
            device: the target's device. Used only if the batch does not fit into the reused tensors.
        """
        self.kind = kind_of(warps)
        if kind_of([*self._known, *warps]) == kind_of(self._known):
            self.kind = kind_of(self._known)
        self._numbers = self._fixed
        if not self._fixed or len(warps) > self._fixed[0].shape[1]:
            self._numbers = [torch.ones(3, len(warps), device=device)]
        settings = [(warp.temperature, warp.top_k, warp.top_p) for warp in warps]
        for numbers in self._numbers:
            # `zip(*settings)` yields the temperatures of all rows, then all top-k, then all top-p.
            for tensor, values in zip(numbers, zip(*settings, strict=True), strict=True):
                if len(set(values)) == 1:
                    # `fill_` does not wait for the device. It also sets the numbers of rows that only fill the batch
                    # up.
                    tensor.fill_(values[0])
                else:
                    tensor[: len(warps)] = torch.tensor(values, dtype=tensor.dtype)

    def __call__(self, logits: Tensor) -> Tensor:
        """Turn logits [B, ..., V] into probabilities, as `Warp` does, with the warp of each row."""
        kind = self.kind
        logits = logits.float()
        if not kind.has_sampled:
            return _one_hot(logits)
        temperature = self._of_rows(0, logits)
        divisor = temperature
        if kind.has_greedy:
            divisor = temperature.where(temperature > 0, 1)
        # Greedy rows are divided by 1. Their result is replaced below.
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
        # A row keeps the tokens that are at least as likely as its k-th likeliest token. The clamp gives a valid index
        # where top-k has no effect: if it is 0, and for a greedy row, whose top-k may be larger than `most`.
        index = (top_k - 1).clamp(min=0, max=most - 1).expand(*logits.shape[:-1], 1)
        smallest_kept = likeliest.gather(-1, index)
        return logits.masked_fill((logits < smallest_kept) & (top_k > 0), -torch.inf)

    def _cut_top_p(self, probabilities: Tensor) -> Tensor:
        top_p = self._of_rows(2, probabilities).clamp(min=_LEAST_TOP_P)
        descending, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token is kept if all likelier tokens together have a probability below top_p. So the likeliest token is
        # always kept. With probabilities [0.5, 0.3, 0.2] and top_p 0.6, the first two tokens are kept.
        likelier_mass = descending.cumsum(-1) - descending
        kept = torch.empty_like(likelier_mass, dtype=torch.bool)
        kept = kept.scatter_(-1, order, likelier_mass < top_p)
        cut = probabilities * kept
        return torch.where(top_p < 1, cut / cut.sum(-1, keepdim=True), probabilities)

    def _of_rows(self, setting: int, logits: Tensor) -> Tensor:
        """Return one setting of each row, in the shape [B, 1, ..., 1] that broadcasts over logits [B, ..., V].

        Args:
            setting: 0 for the temperature, 1 for top-k, 2 for top-p.
        """
        here = [numbers for numbers in self._numbers if numbers.device == logits.device]
        numbers = here[0] if here else self._numbers[0].to(logits.device)
        of_rows = numbers[setting, : len(logits)]
        return of_rows.view(-1, *[1] * (logits.dim() - 1))


def _one_hot(logits: Tensor) -> Tensor:
    """Return distributions [..., V] in which the token with the largest of the logits [..., V] has probability 1. A
    distribution is nan if its largest logit is not finite.
    """
    largest, likeliest = logits.max(-1, keepdim=True)
    # The product of 0 and a number that is not finite is nan. The softmax of such logits would be nan too.
    zero = 0 * largest
    return zero.expand_as(logits).clone().scatter_(-1, likeliest, zero + 1)


AnyWarp = Warp | BatchWarp
