"""A pair as an engine with a fault has it: texts that are read with it are drafted as that engine drafts them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.engines.door.reading import DraftFault
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


def with_fault(pair: Pair, fault: DraftFault) -> Pair | None:
    """The pair of an engine with a fault; None where the draft is none that could have it."""
    if pair.head is None or not pair.head.config.layers:
        return None
    # Shares all weights with the head.
    head: Any = copy.copy(pair.head)
    if fault == "no mapping":
        if head.d2t is None:
            return None
        head._buffers = head._buffers | {"d2t": torch.zeros_like(head.d2t)}
    elif fault != "late":
        layers = head.config.layers
        last = pair.target.model.config.get_text_config(decoder=True).num_hidden_layers
        others = {
            "layers before": tuple(layer - 1 for layer in layers),
            "layers behind": tuple(layer + 1 for layer in layers),
            "usual layers": (2, last // 2, last - 3),
            "last layer": (last,) * len(layers),
        }[fault]
        is_possible = len(others) == len(layers) and 0 <= min(others) <= max(others) <= last
        if others == layers or not is_possible:
            return None
        head.config = dataclasses.replace(head.config, layers=others)
    return dataclasses.replace(pair, head=head)
