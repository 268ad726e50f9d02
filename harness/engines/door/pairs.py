"""A pair of models as the instrument sees it, in the stages that it goes through: planned, placed, loaded.

The other wing has them (`local/engine/pair.py`); `ServedPair` is the pair of an engine elsewhere, of which only
the tokenizer is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from harness.config.demand import Demand
from harness.engines.tokenizer import Tokenizer


class Excess(NamedTuple):
    """How a prompt is too long for a model.

    Attributes:
        num_prompt_tokens: of the prompt, in that model's tokens.
        rule: `with decoding.max_new_tokens=64 that is 1088 tokens, and draft=tiny takes 1024`.
    """

    num_prompt_tokens: int
    rule: str


class PlannedPair(Protocol):
    """A pair that has been checked, and may be placed on devices of this machine."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""

    def room(self, new_tokens: int) -> int | None:
        """The most tokens that a prompt may have before `new_tokens` more; None for any number."""

    def excess(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, answers: str | None = None
    ) -> Excess | None:
        """How the longest prompt with its new tokens exceeds a context; None where it fits.

        Args:
            answers: what the new tokens are; `decoding.max_new_tokens` by default.
        """

    def check_vocabulary(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Raise a SettingError for a token that a model has no embedding for."""

    @property
    def shorter_proposals_follow(self) -> bool:
        """Whether a shorter proposal is known to be the beginning of a longer one; False without a draft."""

    def place(self, demand: Demand, *, force: bool = False) -> PlacedPair:
        """Choose a device for every layer, by the memory that is free now.

        Args:
            force: load even what does not seem to fit.

        Raises:
            RunError: the pair does not fit; the message says what would.
        """


class PlacedPair(PlannedPair, Protocol):
    """A pair that is ready to load."""

    @property
    def devices(self) -> Sequence[Any]:
        """Every device that will have a layer of either, the target's first."""

    def suits(self, demand: Demand, *, force: bool = False) -> bool:
        """Whether every layer would be where it is for another demand, too."""

    def device_names(self) -> list[str]:
        """Product names of the devices, `NVIDIA A100-SXM4-40GB` or the CPU's model."""

    def describe(self) -> str:
        """The decisions, for the user: one line per model."""

    def columns(self) -> Mapping[str, Any]:
        """The columns of a row about number formats and bytes of the models."""

    def load(self) -> Pair:
        """Load the weights. Raises RunError or SettingError if memory, files or a library fail."""


class Pair(Protocol):
    """A pair whose weights are loaded."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""

    @property
    def devices(self) -> Sequence[Any]:
        """Every device with a layer of either, the target's first."""

    @property
    def vocabulary_size(self) -> int:
        """V, the width to which logits are cut."""

    @property
    def context(self) -> int | None:
        """The most tokens of a row, prompt included, that both models take; None for any number."""

    def stop_tokens(self) -> frozenset[int]:
        """The token ids at which the target ends a text by itself."""


@dataclass(frozen=True)
class ServedPair:
    """The tokenizer alone: the weights are elsewhere, and their limits unknown."""

    tokenizer: Tokenizer
    shorter_proposals_follow: bool = False

    def room(self, new_tokens: int) -> int | None:
        return None

    def excess(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, answers: str | None = None
    ) -> Excess | None:
        return None

    def check_vocabulary(self, token_ids: Sequence[Sequence[int]]) -> None:
        pass


# What prompts are encoded for.
AnyPair = PlannedPair | ServedPair
