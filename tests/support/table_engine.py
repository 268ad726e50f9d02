"""An engine whose models are tables: the distribution after a token depends on that token alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from harness.config.settings import DecodingSettings
from harness.local.decoding.warp import Warp


class TableEngine:
    """The part of an engine that `recovery` reads, over transition probabilities [V, V]; a draft may have none."""

    def __init__(self, target: Tensor, draft: Tensor | None = None) -> None:
        self._target, self._draft = target.log(), None if draft is None else draft.log()

    def logits(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        continuations = continuations or [[]] * len(prompts)
        return self._target[[[*a, *b][-1] for a, b in zip(prompts, continuations, strict=True)]]

    def draft_probabilities(
        self,
        prompts: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
        decoding: DecodingSettings,
    ) -> Tensor | None:
        warp = Warp(decoding.temperature, decoding.top_k, decoding.top_p)
        return None if self._draft is None else warp(self._draft[list(first_tokens)])
