"""Where two greedy texts part, and whether rounding explains it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.errors import RunError
from harness.engines.protocol import Reference


@dataclass(frozen=True)
class Divergence:
    """The first position at which two continuations of a prompt differ.

    Attributes:
        expected, actual: the regular arm's token there, and the other's.
        logit_margin: logit of `expected` minus logit of `actual`, after prompt and common prefix.
            A margin within the rounding of the model means that the two tokens tied.
        logit_tolerance: the largest margin there that rounding explains, as measured.
    """

    position: int
    expected: int
    actual: int
    logit_margin: float | None = None
    logit_tolerance: float | None = None

    @property
    def excess(self) -> float:
        """The margin in tolerances: rounding explains one at most. Infinite where the margin is not known."""
        if self.logit_margin is None or self.logit_tolerance is None:
            return math.inf
        return abs(self.logit_margin) / self.logit_tolerance


def first_divergence(
    reference: Reference | None,
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
) -> Divergence | None:
    """Compare two continuations of `prompt`; None where they are the same tokens. Starts a new batch on the target.

    One that ends earlier parts there: its token is then -1, and no margin is known.

    Raises:
        RunError: a token is not in the reference's vocabulary.
    """
    for position, (wanted, got) in enumerate(itertools.zip_longest(expected, actual, fillvalue=-1)):
        if wanted != got:
            if reference is None or -1 in (wanted, got):
                return Divergence(position, wanted, got)
            check_known([*expected[: position + 1], got], reference.vocabulary_size)
            margin = reference.margin([*prompt, *expected[:position]], wanted, got)
            return Divergence(position, wanted, got, margin.value, margin.tolerance)
    return None


def check_known(tokens: Sequence[int], vocabulary_size: int) -> None:
    """Raises RunError for a token that the reference lacks: a server may serve another model."""
    if max(tokens) >= vocabulary_size:
        size = f"vocabulary of {vocabulary_size} tokens: is another model served?"
        raise RunError(f"token {max(tokens)} is not in the model's {size}")
