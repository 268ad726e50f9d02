"""Medusa-1 (Cai et al. 2024, arXiv:2401.10774): several heads that read the target's last hidden state. Each head
predicts a token one position further ahead than the head before it.

Suppose that the text is `a b`. The target has read a, and b was drawn from its last hidden state at a. From this state,
head 0 predicts the token after b, head 1 predicts the next one, and so on. No head knows the tokens of the others.
Their tokens form one chain. Elsewhere in this project, *a head* means all of Medusa's heads together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.local.drafting.heads.head import Draft, Draw, Head, HeadConfig, Unread
from harness.local.drafting.heads.stored import StoredHead
from harness.local.runners.base import gather_rows
from harness.local.runners.slots import SlotCache


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """A configuration with the options of Medusa.

    Attributes:
        num_heads: the number of heads.
        num_blocks: the number of residual blocks in each head.
        output_per_head: whether each head has its own output matrix; if not, all heads use the target's.
    """

    num_heads: int
    num_blocks: int
    output_per_head: bool

    @property
    def most_tokens(self) -> int:
        """The number of heads, each of which drafts one token."""
        return self.num_heads


class Medusa(Head):
    """Medusa-1, in the formats of its authors and of speculators.

    The weights have the names of the published format: `1.0.linear.weight` belongs to the first block of head 1. If
    each head has one block, `1.1.weight` is the output matrix of head 1.
    """

    name = "medusa"
    title = "Medusa-1"
    config_type = MedusaConfig
    config: MedusaConfig
    weight_files = (*Head.weight_files, "medusa_lm_head.safetensors", "medusa_lm_head.pt")

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        """Return the fields of the configuration. The heads are counted in the stored weights, because published
        configurations often state a wrong number. Without stored weights, the configuration must state the number.
        """
        text_config = stored.target.config.get_text_config(decoder=True)
        fields = stored.sizes([text_config.num_hidden_layers])
        num_layers = len(fields["target_layers"])
        if num_layers != 1:
            raise stored.refused(f"reads one layer of the target, not {num_layers}")
        if stored.shapes is not None:
            num_heads = len({name.partition(".")[0] for name in stored.shapes})
            first_head = [name for name in stored.shapes if name.startswith("0.")]
            num_blocks = sum(name.endswith(".linear.weight") for name in first_head)
            output_per_head = f"0.{num_blocks}.weight" in stored.shapes
        else:  # no weights are read: the head is built like those of the authors
            num_heads = stored.required("medusa_num_heads")
            num_blocks = stored.named.get("medusa_num_layers", 1)
            output_per_head = True
        options = {
            "num_heads": num_heads,
            "num_blocks": num_blocks,
            "output_per_head": output_per_head,
        }
        return fields | options

    def __init__(self, config: MedusaConfig) -> None:
        size = config.target_size
        super().__init__(config, size)
        for number in range(config.num_heads):
            parts: list[nn.Module] = [_Block(size) for _ in range(config.num_blocks)]
            if config.output_per_head:
                parts.append(nn.Linear(size, config.vocabulary_size, bias=False))
            self.add_module(str(number), nn.ModuleList(parts))

    def draft(self, unread: Unread, uniforms: Tensor, cache: SlotCache, draw: Draw) -> Draft:
        # [B, D], the state of each row's last read token.
        states = gather_rows(unread.features, unread.last())
        count = min(uniforms.shape[1], self.config.num_heads)
        logits = [self._logits_ahead(number, states) for number in range(count)]
        return draw(torch.stack(logits, dim=1), uniforms[:, :count])

    def _logits_ahead(self, number: int, states: Tensor) -> Tensor:
        """Return the logits [..., V] that head `number` computes from the target's states [..., D]."""
        parts = list(self.get_submodule(str(number)).children())
        for block in parts[: self.config.num_blocks]:
            states = block(states)
        return parts[-1](states) if self.config.output_per_head else self.logits(states)

    @property
    def num_outputs_borrowed(self) -> int:
        return 0 if self.config.output_per_head else self.config.num_heads


class _Block(nn.Module):
    """A residual layer for states of width `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, states: Tensor) -> Tensor:
        return states + nn.functional.silu(self.linear(states))
