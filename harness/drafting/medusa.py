"""Medusa-1 (Cai et al. 2024, arXiv:2401.10774): heads on the target's last hidden state, one for each token ahead.

The tree of Medusa's own code is not built: the heads' tokens form one chain, each drawn without knowing the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.decoding.protocols import Proposal, Step
from harness.decoding.transfer import to_device
from harness.decoding.warp import Warp
from harness.drafting.blocks import Head, HeadConfig, HeadDrafter, hidden_of


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

    def drafter(self, target: PreTrainedModel, warp: Warp) -> MedusaDrafter:
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

    def __init__(self, head: MedusaHead, target: PreTrainedModel, warp: Warp) -> None:
        super().__init__(head.config, head, target, warp)
        self._head = head
        self._states = torch.empty(0)  # [B, D] the ones that the last decided tokens were drawn from

    def start(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step) -> None:
        self._vocabulary_size = step.logits.shape[-1]
        self._states = hidden_of(step)[:, -1, 0]

    def add(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step) -> None:
        self._states = torch.cat([self._states, hidden_of(step)[:, -1, 0]])

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        logits = []
        for number in range(min(num_draft_tokens, self._head.config.num_heads)):
            states = self._states
            blocks = self._head.parts(number)
            output = blocks.pop() if self._head.config.own_outputs else None
            for block in blocks:
                states = block(states)
            logits.append(self._logits(states) if output is None else output(states)[..., : self._vocabulary_size])
        return Proposal(*self._draw(torch.stack(logits, dim=1), uniforms[:, : len(logits)]))

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        states = hidden_of(step)[:, :, 0]
        last = to_device(num_accepted, states.device)
        self._states = states[torch.arange(len(states), device=states.device), last]

    def select(self, rows: Sequence[int]) -> None:
        self._states = self._states[to_device(rows, self._states.device)]
