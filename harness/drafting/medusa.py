"""Medusa-1 (Cai et al. 2024, arXiv:2401.10774): heads on the target's last hidden state, one for each token ahead.

The tree of Medusa's own code is not built: the heads' tokens form one chain, each drawn without knowing the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.decoding.protocols import Proposal
from harness.decoding.warp import AnyWarp
from harness.drafting.blocks import Head, HeadConfig, HeadDrafter


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Medusa heads; `layers` is the target's last.

    Attributes:
        num_heads: the most tokens that can be proposed.
        num_blocks: residual blocks of each head.
        own_outputs: whether each head has an output matrix; otherwise the target's is used.
    """

    num_heads: int
    num_blocks: int = 1
    own_outputs: bool = False


class MedusaHead(Head):
    """The weights of all heads: `{head}.{block}.linear`, then `{head}.{number of blocks}` is the output matrix."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config, config.target_size)
        self.config = config
        size = config.target_size
        for number in range(config.num_heads):
            parts: list[nn.Module] = [_Block(size) for _ in range(config.num_blocks)]
            if config.own_outputs:
                parts.append(nn.Linear(size, config.vocabulary_size, bias=False))
            self.add_module(str(number), nn.ModuleList(parts))

    def parts(self, number: int) -> list[nn.Module]:
        """Of one head."""
        return list(self.get_submodule(str(number)).children())

    def drafter(
        self, target: PreTrainedModel, warp: AnyWarp, confidence: float = 0.0
    ) -> MedusaDrafter:
        """See `HeadDrafter`."""
        return MedusaDrafter(self, target, warp)


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, states: Tensor) -> Tensor:
        return states + nn.functional.silu(self.linear(states))


class MedusaDrafter(HeadDrafter):
    """Proposes a token from each head."""

    _head: MedusaHead

    def _draft(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        last, logits = self._features[self._ends()], []
        self._read()
        for number in range(min(num_draft_tokens, self._head.config.num_heads)):
            states, blocks = last, self._head.parts(number)
            output = blocks.pop() if self._head.config.own_outputs else None
            for block in blocks:
                states = block(states)
            logits.append(
                self._logits(states)
                if output is None
                else output(states)[..., : self._vocabulary_size]
            )
        return Proposal(*self._draw(torch.stack(logits, dim=1), uniforms[:, : len(logits)]))
