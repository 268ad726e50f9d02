"""Randomness as data: uniforms made before the loop, and sampling as a pure function of them.

Each prompt has its own stream, a function of (seed, prompt index, position, purpose). So an answer depends neither on
the batch it ran in, nor on the order, nor on how often an iteration was repeated; and tests can feed chosen numbers.

A position that is proposed again after an earlier rejection reuses its draft uniform. That is sound: a rejection at
position t depends on the uniforms up to t alone, so those of the discarded positions behind it are still uniform.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """Which decision at a position a uniform is for: the last index of the tensor `uniforms` returns."""

    DRAFT = 0  # draw the proposed token
    ACCEPT = 1  # accept or reject it
    TARGET = 2  # draw the target's own token: regular, recovered or bonus


def uniforms(
    seed: int, prompt_indices: Sequence[int], num_positions: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Uniforms in [0, 1), float32 [B, num_positions, len(Purpose)], for the prompts with these indices."""
    rows = [
        # Position first, so that a longer stream begins with the shorter one's numbers.
        np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index]))).random(
            (num_positions, len(Purpose)), dtype=np.float32
        )
        for index in prompt_indices
    ]
    return torch.from_numpy(np.stack(rows)).to(device)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index a row from unnormalised weights [..., V] with uniforms [...] -> [...] (int64).

    The index is the first whose cumulative weight exceeds uniform * total, so a weight of zero is never drawn.
    """
    # In float64 a float32 uniform below 1 times the total stays below the total, and sums keep their order.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[..., -1:], right=True).squeeze(-1)
