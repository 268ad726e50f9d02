"""Medusa-1 (Cai et al. 2024, arXiv:2401.10774): heads on the target's last hidden state, one for
each token ahead.

After `a b` the target has read a, and decided b from its last state there. From the same state head
0 predicts the token after b, head 1 the one after that, and so on, each without knowing the others.
Their tokens form one chain. A "head" of this project is all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.heads.blocks import Head, HeadConfig
from harness.local.drafting.heads.drafter import Draft, HeadDrafter
from harness.local.drafting.heads.formats import Shapes, StoredHead
from harness.local.drafting.heads.unread import Unread


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Medusa heads; their only layer of the target is its last one.

    Attributes:
        num_heads: the most tokens that can be proposed.
        num_blocks: residual blocks of each head.
        own_outputs: whether each head has an output matrix; otherwise the target's is used.
    """

    num_heads: int
    num_blocks: int = 1
    own_outputs: bool = False

    @property
    def borrowed_outputs(self) -> int:
        """Numbers of the target's output matrix that a pass reads: all of them, once for each head."""
        return 0 if self.own_outputs else self.num_heads * self.target_size * self.vocabulary_size


class MedusaDrafter(HeadDrafter):
    """Proposes a token from each head."""

    head: MedusaHead

    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        logits = self.logits(unread, uniforms.shape[1])
        return self.draw(logits, uniforms[:, : logits.shape[1]])

    def logits(self, unread: Unread, count: int) -> Tensor:
        """Return the logits [B, n, V] of the first n heads: `count`, or all if there are fewer."""
        # [B, D], of each row's last token.
        states = unread.features[unread.last()]
        logits = [
            self.head.logits(number, states, self._logits)
            for number in range(min(count, self.head.config.num_heads))
        ]
        # A head's own matrix may have more rows than there are tokens.
        return torch.stack(logits, dim=1)[..., : self.vocabulary_size]


class MedusaHead(Head):
    """The weights of all heads.

    Their names are those of the published format: `1.0.linear.weight` is in the first block of head
    1, and with one block for each head `1.1.weight` is its output matrix.
    """

    drafter_class = MedusaDrafter

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config, config.target_size)
        size = config.target_size
        for number in range(config.num_heads):
            parts: list[nn.Module] = [_Block(size) for _ in range(config.num_blocks)]
            if config.own_outputs:
                parts.append(nn.Linear(size, config.vocabulary_size, bias=False))
            self.add_module(str(number), nn.ModuleList(parts))

    def logits(self, number: int, states: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits [..., V] of one head, from the target's states [..., D].

        Args:
            output: turns states into logits, for heads without output matrices of their own.
        """
        blocks = list(self.get_submodule(str(number)).children())
        own_output = blocks.pop() if self.config.own_outputs else output
        for block in blocks:
            states = block(states)
        return own_output(states)


class _Block(nn.Module):
    """A residual layer over states of `size` numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, states: Tensor) -> Tensor:
        return states + nn.functional.silu(self.linear(states))


class Medusa(HeadKind):
    """Medusa-1, as its authors and speculators store it."""

    name = "medusa"
    head_class = MedusaHead
    weight_files = (
        *HeadKind.weight_files,
        "medusa_lm_head.safetensors",
        "medusa_lm_head.pt",
    )

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return "medusa_num_heads" in raw or raw.get("model_type") == "medusa"

    def config(self, stored: StoredHead, shapes: Shapes | None) -> MedusaConfig:
        """Heads are counted in the weights, because stored configurations often state another
        number.
        """
        text_config = stored.target.config.get_text_config(decoder=True)
        sizes = stored.sizes([text_config.num_hidden_layers])
        num_heads = stored.value("medusa_num_heads", 0)
        num_blocks = stored.value("medusa_num_layers", 1)
        # Heads of random weights have output matrices, as the authors' have.
        own_outputs = shapes is None
        if shapes is not None:
            num_heads = len({name.partition(".")[0] for name in shapes})
            first_head = [name for name in shapes if name.startswith("0.")]
            num_blocks = sum(name.endswith(".linear.weight") for name in first_head)
            own_outputs = f"0.{num_blocks}.weight" in shapes
        if len(sizes["layers"]) != 1:
            number = len(sizes["layers"])
            raise stored.refused(f"reads one layer of the target, not {number}")
        if not num_heads or not num_blocks:
            raise stored.refused("holds no Medusa heads")
        return MedusaConfig(
            **sizes, num_heads=num_heads, num_blocks=num_blocks, own_outputs=own_outputs
        )


RECORD = Medusa()
