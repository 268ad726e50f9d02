"""The two seams: a runner hides the KV cache, a drafter hides where proposals come from; and the record loops yield."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from harness.decoding.verify import Verdict


class Runner(Protocol):
    """A batch of sequences that can be extended and taken back."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begin a new batch: token ids of B prompts -> logits [B, V] after each prompt's last token."""
        ...

    def extend(self, tokens: Tensor) -> Tensor:
        """Append tokens [B, n] to every row -> logits [B, n, V] after each of them."""
        ...

    def keep(self, counts: Sequence[int]) -> None:
        """Of the tokens extended since the last `keep` or `start`, row b keeps the first counts[b]."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, renumbered in this order. Everything extended must have been kept or not."""
        ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter proposes: tokens [B, K], and the distributions [B, K, V] (float32) they were drawn from."""

    tokens: Tensor
    probabilities: Tensor


class Drafter(Protocol):
    """A strategy that proposes tokens and then hears what became of them."""

    def start(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int]) -> None:
        """Begin a new batch: B prompts, and the token the target decided after each."""
        ...

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """Propose K tokens a row; `uniforms` [B, K] are the random numbers to draw them with."""
        ...

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        """Of the last proposal row b keeps its first num_accepted[b] tokens, and next_tokens[b] follows them."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, renumbered in this order."""
        ...


class Origin(StrEnum):
    """Who wrote a token."""

    TARGET = "target"  # drawn from the target alone: regular decoding, and the first token of every generation
    DRAFT = "draft"  # proposed by the drafter and accepted
    RECOVERED = "recovered"  # drawn from the residual after a rejection
    BONUS = "bonus"  # drawn from the target after K acceptances


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one turn of a loop decided. All lists run parallel to `rows`, the rows of the batch that had not ended.

    Attributes:
        rows: positions in the batch that was started.
        tokens: the tokens each row gained, at least one, cut after a stop token or at the length limit.
        origins: who wrote each of `tokens`.
        proposed: the draft tokens verified; empty in regular decoding.
        num_accepted: how many of `proposed` were accepted.
        verdict: the verification itself, on the device; None where nothing was verified.
    """

    rows: list[int]
    tokens: list[list[int]]
    origins: list[list[Origin]]
    proposed: list[list[int]]
    num_accepted: list[int]
    verdict: Verdict | None = None
