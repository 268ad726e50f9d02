"""Domino (SpecForge 2026): a DFlash head that corrects its logits by the tokens drawn before.

A gated recurrent unit reads the embeddings of the anchor and of the tokens drawn so far in a block.
From its state and from the block's own state at a place, two matrices make what is added to the
logits there; the first tokens of a block go without. So tokens are drawn one after the other,
without another pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.local.drafting.heads.block_formats import block_fields
from harness.local.drafting.heads.drafter import Draft, stacked
from harness.local.drafting.heads.formats import Shapes, StoredHead
from harness.local.drafting.kinds.dflash import BlockConfig, BlockDrafter, BlockHead, DFlash


@dataclass(frozen=True, kw_only=True)
class DominoConfig(BlockConfig):
    """A Domino head.

    Attributes:
        num_uncorrected: tokens at the beginning of a block whose logits stay as they are.
        recurrent_size: width of the recurrent unit's state.
        inner_size: width between the two matrices.
    """

    num_uncorrected: int
    recurrent_size: int
    inner_size: int


class DominoDrafter(BlockDrafter):
    """Proposes with a Domino head."""

    head: DominoHead

    def draw_block(self, anchor: Tensor, states: Tensor, uniforms: Tensor) -> Draft:
        head = self.head
        logits = self._logits(states)
        memory = states.new_zeros(1, len(anchor), head.config.recurrent_size)
        drawn: list[Draft] = []
        before = anchor
        for place in range(states.shape[1]):
            _, memory = head.prefix_gru(self.embed(before).unsqueeze(0), memory)
            here = logits[:, place]
            if place >= head.config.num_uncorrected:
                features = torch.cat([states[:, place], memory[0]], dim=-1)
                here = here + head.embed_proj(features)[:, : here.shape[-1]]
            drawn.append(self.draw(here, uniforms[:, place]))
            before = drawn[-1].tokens
        return stacked(drawn)


class DominoHead(BlockHead):
    """The weights of a Domino head."""

    drafter_class = DominoDrafter
    config: DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        width = config.transformer.hidden_size
        self.prefix_gru = nn.GRU(width, config.recurrent_size, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + config.recurrent_size, config.inner_size, bias=False),
            nn.SiLU(),
            nn.Linear(config.inner_size, config.draft_vocabulary_size, bias=False),
        )


class Domino(DFlash):
    """Domino, as SpecForge stores it: in z-lab's format, with `projector_type`."""

    name = "domino"
    head_class = DominoHead

    def config(self, stored: StoredHead, shapes: Shapes | None) -> DominoConfig:
        settings = stored.raw.get("dflash_config") or stored.raw
        fields = block_fields(stored, shapes, from_anchor=False, causal_windows=True)
        if fields["draft_vocabulary_size"] != fields["vocabulary_size"]:
            raise stored.refused("drafts some of the target's tokens only, which is not supported")
        # The anchor predicts where labels were shifted in training. Taken the wrong way, every draft
        # token is the one before its place, and nothing is accepted.
        fields["from_anchor"] = bool(settings.get("shift_label"))
        return DominoConfig(
            **fields,
            num_uncorrected=settings.get("pure_draft_prefix_len") or 0,
            recurrent_size=_size(stored, settings, "gru_hidden_dim"),
            inner_size=_size(stored, settings, "emb_dim"),
        )


def _size(stored: StoredHead, settings: Mapping[str, object], key: str) -> int:
    size = settings.get(key)
    if not isinstance(size, int) or size < 1:
        raise stored.refused(f"names no {key} above 0 ({size})")
    return size


RECORD = Domino()
