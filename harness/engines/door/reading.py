"""Texts that are there already, read by both models of a pair: the values, and who reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.results.statistics.iterations import Cut

# Texts of a prompt that are read together.
TOGETHER = 8


@dataclass(frozen=True)
class ReadText:
    """A text of n tokens, two at least, after a prompt.

    Attributes:
        cut: into iterations, for every K.
        num_tokens: n.
        num_impossible: tokens that the target cannot draw.
        log_probability: of the others under the target, summed.
        expected, variance: of that sum, if the target drew each token.
    """

    cut: Cut
    num_tokens: int
    num_impossible: int
    log_probability: float
    expected: float
    variance: float


class TextReader(Protocol):
    """Reads texts with a pair, in one pass of the target, and of the draft one for each depth at most."""

    def read(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Iterator[ReadText]:
        """Read texts of two tokens or more, each after its prompt; those of one prompt that follow each other together.

        Raises:
            SettingError: for a draft that draws its tokens and gives no probabilities to a text.
            RunError: logits that are nan or infinite.
        """
        ...

    def close(self) -> None:
        """Give the caches back."""
