"""A pair that drafts with a known mistake, to find out whether an engine makes it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.engines.door.reading import DraftMistake
from harness.local.drafting.method import Pair
from harness.local.engine.reading import PairReader


class LateReader(PairReader):
    """Gives a head the hidden states of the token before each one."""

    def _draft_probabilities(
        self, tokens: Sequence[int], answer: range, features: Tensor | None
    ) -> Tensor:
        assert features is not None
        late = torch.cat([features[:1], features[:-1]])
        return super()._draft_probabilities(tokens, answer, late)


def drafting_wrong(pair: Pair, mistake: DraftMistake) -> Pair | None:
    """The pair with a mistake; None if its draft cannot have it. What is drafted late, `LateReader` reads."""
    if pair.head is None or not pair.head.config.layers:
        return None
    # Shares all weights with the head.
    head: Any = copy.copy(pair.head)
    if mistake == "no mapping":
        if head.d2t is None:
            return None
        # A new dict, as the copy shares the head's. With offsets of 0, draft tokens are taken for the target's.
        head._buffers = head._buffers | {"d2t": torch.zeros_like(head.d2t)}
    elif mistake != "late":
        layers = head.config.layers
        last = pair.target.model.config.get_text_config(decoder=True).num_hidden_layers
        wrong_layers = {
            "layers before": tuple(layer - 1 for layer in layers),
            "layers behind": tuple(layer + 1 for layer in layers),
            # Those of EAGLE-3's own heads.
            "usual layers": (2, last // 2, last - 3),
            "last layer": (last,) * len(layers),
        }[mistake]
        is_possible = (
            len(wrong_layers) == len(layers) and 0 <= min(wrong_layers) <= max(wrong_layers) <= last
        )
        if wrong_layers == layers or not is_possible:
            return None
        head.config = dataclasses.replace(head.config, layers=wrong_layers)
    return dataclasses.replace(pair, head=head)
