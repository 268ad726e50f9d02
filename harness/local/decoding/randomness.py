"""Randomness as data: uniforms made before the loop, and sampling as a pure function of them.

Each prompt has its own stream, a function of (seed, prompt index, position, purpose). So an answer
does not depend on the batch it ran in, on the order of prompts, or on how often an iteration was repeated.
Tests can feed chosen numbers.

A position that is proposed again, after a rejection before it, uses the same uniforms as the first time. This is
sound for the usual rule: a rejection at position t depends only on the uniforms up to t, so those of the
discarded positions after t are still uniform. It is not sound for block verification, where a rejection at
t depends on the tokens after t too. With that rule, drafting and accepting take new numbers in every iteration
(`redraw` of `iteration.Calls`).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

# Up to _MOST_SCANNED weights are scanned at once. More are scanned in blocks of _BLOCK weights, because one scan of a
# whole vocabulary takes ten times as long.
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
    """Return uniforms in [0, 1), float32 [num_positions, len(Purpose)], for the prompt with this index. A longer stream
    begins with the numbers of a shorter one.
    """
    prompt_seed = np.random.SeedSequence([seed, prompt_index])
    generator = np.random.Generator(np.random.Philox(prompt_seed))
    # The position is the first dimension, so that a longer stream begins with the shorter one's numbers.
    numbers = generator.random((num_positions, len(Purpose)), dtype=np.float32)
    return torch.from_numpy(numbers).to(device)


def inverse_cdf(weights: Tensor, uniforms: Tensor, otherwise: int | None = None) -> Tensor:
    """Draw indices (int64) from unnormalised float32 weights [..., V].

    The index is the first whose cumulative weight exceeds uniform * total, so an index of weight zero is
    never drawn. With weights [1, 0, 3] the uniform 0.2 draws index 0, and 0.25 draws index 2.

    Args:
        uniforms: [...] to draw one index for each row, which returns [...]; or [..., n] to draw n, which returns
            [..., n].
        otherwise: the index for rows whose weights contain nan or are all zero; V if None.
    """
    if uniforms.dim() < weights.dim():
        return inverse_cdf(weights, uniforms.unsqueeze(-1), otherwise).squeeze(-1)
    if otherwise is None:
        otherwise = weights.shape[-1]
    # In float64, a float32 uniform below 1 times the total is below the total, and a cumulative sum never decreases.
    if weights.shape[-1] > _MOST_SCANNED:
        return _inverse_cdf_by_blocks(weights, uniforms, otherwise)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    index = torch.searchsorted(cumulative, uniforms * total, right=True)
    # The result of a search through nan depends on the compiler.
    return index.where(total > 0, otherwise)


def _inverse_cdf_by_blocks(weights: Tensor, uniforms: Tensor, otherwise: int) -> Tensor:
    """Draw as `inverse_cdf` does: first a block, by the sums of all blocks, then one of its weights."""
    size = weights.shape[-1]
    cumulative = _block_sums(weights).cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    wanted = uniforms * total
    # False for weights that contain nan or are all zero.
    can_be_drawn = total > 0
    block = torch.searchsorted(cumulative, wanted, right=True).where(can_be_drawn, 0)

    index = block.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    block_weights = weights.gather(-1, index.clamp(max=size - 1).flatten(-2)).double()
    within = block_weights.view(index.shape).where(index < size, 0).cumsum(-1)
    before = cumulative.gather(-1, (block - 1).clamp(min=0)).where(block > 0, 0)
    index = torch.searchsorted(within, (wanted - before).unsqueeze(-1), right=True)
    # Rounding may make a block's scan end below the block's sum. Its last weight above zero is drawn then.
    last = torch.searchsorted(within, within[..., -1:].contiguous())
    drawn = block * _BLOCK + torch.minimum(index, last).squeeze(-1)
    return drawn.where(can_be_drawn, otherwise)


def _block_sums(weights: Tensor) -> Tensor:
    """Return the sum of each whole block, followed by the sum of the remaining weights if there are any."""
    size = weights.shape[-1]
    whole = size // _BLOCK * _BLOCK
    # In float32, a block's sum is as exact as its weights. Summing in float64 would first copy all weights.
    sums = weights[..., :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    if whole == size:
        return sums
    rest = weights[..., whole:].sum(-1, keepdim=True)
    return torch.cat([sums, rest], dim=-1)


def are_tokens(uniforms: Tensor) -> bool:
    """Whether a drafter got tokens to propose in place of random numbers, which replays an existing text."""
    return not uniforms.is_floating_point()


def existing_index(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw as `inverse_cdf` does, except that weights with nan give V - 1, an index that exists.

    Feeding V to a model makes a GPU fail. With V - 1 the pass ends, and the host can report the nan. If `uniforms` are
    tokens (`are_tokens`), these are returned.
    """
    if are_tokens(uniforms):
        return uniforms
    return inverse_cdf(weights, uniforms, otherwise=weights.shape[-1] - 1)
