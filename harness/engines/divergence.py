"""Where two greedy texts part, and whether rounding explains it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from harness.engines.protocol import Reference


@dataclass(frozen=True)
class Divergence:
    """The first position at which two continuations of a prompt differ.

    Attributes:
        expected, actual: the regular arm's token there, and the other's.
        logit_margin: logit of `expected` minus logit of `actual`, in a forward pass over prompt and common prefix. A
            margin within the rounding of the number format means that the two tokens tied; near 0 nothing is wrong.
        largest_logit: in absolute value, at that position: rounding is relative to it.
    """

    position: int
    expected: int
    actual: int
    logit_margin: float | None = None
    largest_logit: float | None = None


def first_divergence(
    reference: Reference | None, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int]
) -> Divergence | None:
    """Compare two continuations of `prompt`; None where they are the same tokens. Starts a new batch on the target.

    One that ends earlier parts there: its token is then -1, and no margin is known.
    """
    for position, (wanted, got) in enumerate(itertools.zip_longest(expected, actual, fillvalue=-1)):
        if wanted != got:
            if reference is None or -1 in (wanted, got):
                return Divergence(position, wanted, got)
            logits = reference.logits([[*prompt, *expected[:position]]])[0]
            return Divergence(position, wanted, got, float(logits[wanted] - logits[got]), float(logits.abs().max()))
    return None
