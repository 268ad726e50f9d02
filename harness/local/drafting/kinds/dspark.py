"""DSpark: a DFlash head whose tokens are drawn one after the other, without another pass.

Its Markov head adds to the logits at each place of a block a bias that depends on the token before.
Its confidence head estimates, for each place, the chance that the token there is accepted if those
before it are; with `draft.threshold` tokens are offered only as long as this chance is high enough.
A head may lack either of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.local.drafting.heads.block_formats import block_fields, is_speculators
from harness.local.drafting.heads.drafter import Draft
from harness.local.drafting.heads.formats import Shapes, StoredHead
from harness.local.drafting.kinds.dflash import BlockConfig, BlockHead, DFlash, SequentialDrafter

# The rank of a Markov head that a configuration in speculators' format leaves out.
_USUAL_RANK = 256


@dataclass(frozen=True, kw_only=True)
class SparkConfig(BlockConfig):
    """A DSpark head.

    Attributes:
        markov_rank: the width of the Markov head's embeddings; 0 without a Markov head.
        confidence_markov: whether the confidence head reads the embedding of the token before, too.
    """

    markov_rank: int = 0
    confidence_markov: bool = False


class SparkDrafter(SequentialDrafter):
    """Proposes with a DSpark head."""

    head: SparkHead

    def draw_block(self, anchor: Tensor, states: Tensor, uniforms: Tensor) -> Draft:
        return self._offer(anchor, states, super().draw_block(anchor, states, uniforms))

    def logits_after(self, states: Tensor) -> Callable[[int, Tensor], Tensor]:
        logits = self._logits(states)
        markov_head = self.head.markov_head

        def after(place: int, before: Tensor) -> Tensor:
            own = logits[:, place]
            if markov_head is None:
                return own
            bias = markov_head["markov_w2"](markov_head["markov_w1"](before))
            return own + bias[..., : own.shape[-1]]

        return after

    def _offer(self, anchor: Tensor, states: Tensor, drawn: Draft) -> Draft:
        """Offer all tokens, or as many as the confidence head supports.

        It sees the tokens before each, never the token itself, so that verification stays lossless.
        """
        head = self.head
        if not self._confidence or head.confidence_head is None:
            return drawn
        if head.config.confidence_markov:
            assert head.markov_head is not None
            before = torch.cat([anchor.unsqueeze(1), drawn.tokens[:, :-1]], dim=1)
            states = torch.cat([states, head.markov_head["markov_w1"](before)], dim=-1)
        expected = head.confidence_head["proj"](states).squeeze(-1).float().sigmoid()
        lengths = (expected >= self._confidence).long().cumprod(-1).sum(-1)
        return drawn._replace(lengths=lengths)


class SparkHead(BlockHead):
    """The weights of a DSpark head."""

    drafter_class = SparkDrafter

    def __init__(self, config: SparkConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        self.markov_head: nn.ModuleDict | None = None
        self.confidence_head: nn.ModuleDict | None = None
        if rank:
            previous = nn.Embedding(config.vocabulary_size, rank)
            following = nn.Linear(rank, config.draft_vocabulary_size, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": previous, "markov_w2": following})
        if config.confidence:
            width = config.transformer.hidden_size
            if config.confidence_markov:
                width += rank
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})


class DSpark(DFlash):
    """DSpark, as speculators and DeepSpec store it."""

    name = "dspark"
    head_class = SparkHead

    def config(self, stored: StoredHead, shapes: Shapes | None) -> SparkConfig:
        raw = stored.raw
        rank = stored.value("markov_rank", _USUAL_RANK if is_speculators(raw) else 0)
        kind = stored.value("markov_head_type", "vanilla")
        if rank and kind != "vanilla":
            raise stored.refused(f"has a Markov head of type {kind}; vanilla is supported")
        is_confident = stored.value("enable_confidence_head", is_speculators(raw))
        reads_token = stored.value("confidence_head_with_markov", True)
        return SparkConfig(
            **block_fields(stored, shapes, from_anchor=True, causal_windows=True),
            markov_rank=rank,
            confidence=is_confident,
            confidence_markov=is_confident and reads_token and rank > 0,
        )


RECORD = DSpark()
