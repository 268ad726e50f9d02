"""The record of decided tokens that every loop of this wing yields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.engines.arrivals import Origin


class Verified(Protocol):
    """What a verification knows about the draft tokens of each row; tensors [B, K] of torch, on the device."""

    @property
    def target_probability(self) -> Any:
        """The target's probability of each draft token."""

    @property
    def draft_probability(self) -> Any:
        """The drafter's."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """The tokens that one turn of a loop decided, in the rows that had not ended before it. All
    lists are parallel to `rows`.

    Attributes:
        rows: their numbers: 0 for the first one that joined the batch, and so on.
        tokens: the tokens each row gained, at least one, cut after a stop token or at the length
            limit.
        origins: where each of `tokens` comes from.
        proposed: the draft tokens verified; empty in regular decoding.
        num_accepted: how many of `proposed` were accepted.
        verdict: the verification itself; None where nothing was verified.
        logits: of rows whose request keeps them, by row number: the target's logits [n, V], on the device. logits[i]
            decided tokens[i]; n may be more than the number of tokens. For chains alone.
    """

    rows: list[int]
    tokens: list[list[int]]
    origins: list[list[Origin]]
    proposed: list[list[int]]
    num_accepted: list[int]
    verdict: Verified | None = None
    logits: Mapping[int, Any] = field(default_factory=dict)
