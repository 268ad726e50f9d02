"""Randomness as data: uniforms made before the loop, and sampling as a pure function of them.

Each prompt has its own stream, a function of (seed, prompt index, position, purpose). So an answer
does not depend on the batch it ran in, on the order, or on how often an iteration was repeated; and
tests can feed chosen numbers.

A position that is proposed again after an earlier rejection reuses its uniforms, of all purposes.
That is sound: a rejection at position t depends on the uniforms up to t alone, so those of the
discarded positions after it are still uniform. That does not hold for block verification, whose rejection at
t depends on the tokens after it too. There
drafting and accepting take new numbers in every iteration (`redraw` of `loop.Loop`).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

# Up to this many weights are scanned at once, and more in blocks of this size.
_MOST_SCANNED = 4096
_BLOCK = 512


class Purpose(IntEnum):
    """The decision at a position for which a random number is used; indexes the last dimension of
    `uniforms`.
    """

    DRAFT = 0  # draw the proposed token
    ACCEPT = 1  # accept or reject it
    TARGET = 2  # draw the target's own token: regular, recovered or bonus


def uniforms(
    seed: int, prompt_index: int, num_positions: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Make uniforms in [0, 1), float32 [num_positions, len(Purpose)], for the prompt with this
    index.
    """
    prompt_seed = np.random.SeedSequence([seed, prompt_index])
    generator = np.random.Generator(np.random.Philox(prompt_seed))
    # Position first, so that a longer stream begins with the shorter one's numbers.
    numbers = generator.random((num_positions, len(Purpose)), dtype=np.float32)
    return torch.from_numpy(numbers).to(device)


def inverse_cdf(weights: Tensor, uniforms: Tensor, otherwise: int | None = None) -> Tensor:
    """Draw from unnormalised float32 weights [..., V]: one index per row with uniforms [...] -> [...], or
    n with uniforms [..., n] -> [..., n] (int64).

    The index is the first whose cumulative weight exceeds uniform * total, so a weight of zero is
    never drawn.

    Args:
        otherwise: what weights give that are nan, or all zero; V by default.
    """
    if uniforms.dim() < weights.dim():
        return inverse_cdf(weights, uniforms.unsqueeze(-1), otherwise).squeeze(-1)
    if otherwise is None:
        otherwise = weights.shape[-1]
    # In float64 a float32 uniform below 1 times the total stays below the total, and the sums of
    # more weights are never smaller.
    if weights.shape[-1] > _MOST_SCANNED:
        return _inverse_cdf_by_blocks(weights, uniforms, otherwise)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    index = torch.searchsorted(cumulative, uniforms * total, right=True)
    # Where a search through nan ends depends on who compiled it.
    return index.where(total > 0, otherwise)


def _inverse_cdf_by_blocks(weights: Tensor, uniforms: Tensor, otherwise: int) -> Tensor:
    """Draw as `inverse_cdf`: first a block, by the sums of all blocks, then one of its weights.

    A scan of all weights takes ten times as long.
    """
    size = weights.shape[-1]
    cumulative = _block_sums(weights).cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    wanted = uniforms * total
    # Not so for weights that are nan, or all zero.
    can_be_drawn = total > 0
    block = torch.searchsorted(cumulative, wanted, right=True).where(can_be_drawn, 0)

    index = block.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    block_weights = weights.gather(-1, index.clamp(max=size - 1).flatten(-2)).double()
    within = block_weights.view(index.shape).where(index < size, 0).cumsum(-1)
    before = cumulative.gather(-1, (block - 1).clamp(min=0)).where(block > 0, 0)
    index = torch.searchsorted(within, (wanted - before).unsqueeze(-1), right=True)
    # By rounding a block's scan may end below its sum; then it is the last weight that is not zero.
    last = torch.searchsorted(within, within[..., -1:].contiguous())
    drawn = block * _BLOCK + torch.minimum(index, last).squeeze(-1)
    return drawn.where(can_be_drawn, otherwise)


def _block_sums(weights: Tensor) -> Tensor:
    """Return the sums of whole blocks, and of the weights that are left over, if there are any."""
    size = weights.shape[-1]
    whole = size // _BLOCK * _BLOCK
    # A block's sum is as exact as the weights in it; to sum them in float64 would copy all of them
    # first.
    sums = weights[..., :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    if whole == size:
        return sums
    rest = weights[..., whole:].sum(-1, keepdim=True)
    return torch.cat([sums, rest], dim=-1)


def are_tokens(uniforms: Tensor) -> bool:
    """Whether a drafter gets tokens to propose in place of random numbers: so an existing text is replayed."""
    return not uniforms.is_floating_point()


def existing_index(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw as `inverse_cdf`, but weights that are nan give V - 1, an index that exists.

    A model that is fed the index V makes a GPU fail; with V - 1 the host can still report the nan.
    Tokens in place of uniforms are taken.
    """
    if are_tokens(uniforms):
        return uniforms
    return inverse_cdf(weights, uniforms, otherwise=weights.shape[-1] - 1)
