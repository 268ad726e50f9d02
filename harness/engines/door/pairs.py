"""The pair of an engine elsewhere, of which only the tokenizer is here. Pairs of models are in `local.engine.pair`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from harness.engines.tokenizer import Tokenizer

if TYPE_CHECKING:
    from harness.local.engine.pair import PlannedPair


@dataclass(frozen=True)
class ServedPair:
    """The tokenizer alone: the weights are elsewhere, and their limits unknown."""

    tokenizer: Tokenizer
    short_proposals_are_prefixes: bool = False

    def room(self, new_tokens: int) -> None:
        return None

    def excess(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, answers: str | None = None
    ) -> None:
        return None

    def check_vocabulary(self, token_ids: Sequence[Sequence[int]]) -> None:
        pass


# What prompts are encoded for.
AnyPair: TypeAlias = "PlannedPair | ServedPair"
