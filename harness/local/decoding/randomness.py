"""Randomness as data: uniform random numbers are made before the loop, and sampling is a pure function of them.

Each prompt has its own stream of random numbers, which are a function of seed, prompt index, position and purpose. So
an answer does not depend on the batch in which it was decoded, on the order of prompts, or on how often a position
was drafted. Tests can pass chosen numbers.

If an earlier draft token is rejected, a position is drafted again, with the same random numbers as the first time. This
is sound for the usual rule. There, a rejection at position t depends only on the numbers up to t, so the numbers of the
discarded positions after t are still uniform. It is not sound for block verification, where a rejection at t also
depends on the tokens after t. With block verification, drafting and accepting therefore take new numbers in every
iteration (`redraw` of `iteration.Calls`).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

# Up to _MOST_SCANNED weights are summed in one scan. More weights are divided into blocks of _BLOCK weights, because a
# scan of a whole vocabulary takes ten times as long.
_MOST_SCANNED = 4096
_BLOCK = 512


class Purpose(IntEnum):
    """The decision for which a random number is used at a position: an index of the last dimension of `uniforms`."""

    DRAFT = 0  # drawing the draft token
    ACCEPT = 1  # accepting or rejecting the draft token
    TARGET = 2  # drawing the target's own token: a regular, recovered or bonus token


def uniforms(
    seed: int, prompt_index: int, num_positions: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return uniform random numbers in [0, 1), float32 [num_positions, len(Purpose)], for the prompt with this index.

    With more positions, the result begins with the same numbers as with fewer positions.
    """
    prompt_seed = np.random.SeedSequence([seed, prompt_index])
    generator = np.random.Generator(np.random.Philox(prompt_seed))
    # The position must be the first dimension, so that a longer stream begins with the numbers of a shorter one.
    numbers = generator.random((num_positions, len(Purpose)), dtype=np.float32)
    return torch.from_numpy(numbers).to(device)


def inverse_cdf(weights: Tensor, uniforms: Tensor, otherwise: int | None = None) -> Tensor:
    """Draw indices (int64) according to unnormalised float32 weights [..., V].

    The drawn index is the first one whose cumulative weight exceeds uniform * total. So an index with weight 0 is never
    drawn. With more than `_MOST_SCANNED` weights, this holds up to rounding in float32. For example, with weights
    [1, 0, 3], the uniform 0.2 draws index 0, and 0.25 draws index 2.

    Args:
        uniforms: [...] to draw one index for each distribution; or [..., n] to draw n indices for each. The result has
            the same shape.
        otherwise: the result for distributions whose weights contain nan or are all zero; V if None.
    """
    if uniforms.dim() < weights.dim():
        return inverse_cdf(weights, uniforms.unsqueeze(-1), otherwise).squeeze(-1)
    if otherwise is None:
        otherwise = weights.shape[-1]
    # Sums are computed in float64. Then the product of a float32 uniform below 1 and the total is always below the
    # total, and a cumulative sum never decreases.
    if weights.shape[-1] > _MOST_SCANNED:
        return _inverse_cdf_by_blocks(weights, uniforms, otherwise)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    index = torch.searchsorted(cumulative, uniforms * total, right=True)
    # Weights with nan are handled separately, because the result of a search in nan depends on the compiler.
    return index.where(total > 0, otherwise)


def _inverse_cdf_by_blocks(weights: Tensor, uniforms: Tensor, otherwise: int) -> Tensor:
    """Draw as `inverse_cdf` does, in two steps: first draw a block, according to the sums of all blocks, and then one
    of the block's weights.

    With blocks of 2, weights [1, 0, 3, 4] and uniform 0.25, the wanted cumulative weight is 2. The sums [1, 7] add up
    to [1, 8], so block 1 is drawn. The block before it ends at 1. In [3, 4], which adds up to [3, 7], the remaining
    2 - 1 draws the first weight, which is index 2.
    """
    size = weights.shape[-1]
    cumulative = _block_sums(weights).cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    wanted = uniforms * total
    # False for weights that contain nan or are all zero.
    can_be_drawn = total > 0
    block = torch.searchsorted(cumulative, wanted, right=True).where(can_be_drawn, 0)

    # `members`, `within`, [..., n, _BLOCK]: the indices of the drawn blocks' weights, and the cumulative weights. The
    # last block may be shorter: its missing weights count as 0. To gather weights, all n blocks stand in one dimension.
    members = block.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    block_weights = weights.gather(-1, members.clamp(max=size - 1).flatten(-2)).double()
    within = block_weights.view(members.shape).where(members < size, 0).cumsum(-1)
    before = cumulative.gather(-1, (block - 1).clamp(min=0)).where(block > 0, 0)
    # [..., n, 1]: the index of the drawn weight within its block.
    index = torch.searchsorted(within, (wanted - before).unsqueeze(-1), right=True)
    # Because of rounding, a block's cumulative sum may end below the sum that drew the block. If so, the search finds
    # no index, and the block's last weight above zero is drawn.
    last = torch.searchsorted(within, within[..., -1:].contiguous())
    drawn = block * _BLOCK + torch.minimum(index, last).squeeze(-1)
    return drawn.where(can_be_drawn, otherwise)


def _block_sums(weights: Tensor) -> Tensor:
    """Return the sum of each whole block, followed by the sum of the remaining weights if there are any."""
    size = weights.shape[-1]
    whole = size // _BLOCK * _BLOCK
    # The sum of a block is computed in float32, which is as exact as the weights are. Summing in float64 would first
    # copy all weights.
    sums = weights[..., :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    if whole == size:
        return sums
    rest = weights[..., whole:].sum(-1, keepdim=True)
    return torch.cat([sums, rest], dim=-1)


def are_tokens(uniforms: Tensor) -> bool:
    """Whether `uniforms` contains tokens that a drafter must propose, instead of random numbers. This is so while an
    existing text is replayed.
    """
    return not uniforms.is_floating_point()


def existing_index(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw as `inverse_cdf` does, but return V - 1, an index that exists, for weights with nan.

    If a model reads the token V, a GPU fails. With V - 1 the pass ends normally, and the host can report the nan. If
    `uniforms` contains tokens (`are_tokens`), it is returned unchanged.
    """
    if are_tokens(uniforms):
        return uniforms
    return inverse_cdf(weights, uniforms, otherwise=weights.shape[-1] - 1)
