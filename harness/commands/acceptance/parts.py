"""Parts of conversations, by kind of token, turn and context: what is accepted in each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from harness.engines.door.reading import ReadText
from harness.measuring.prompts.transcripts import Kind, Reading
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import skewed_ratio_of_totals


@dataclass
class Part:
    """Tokens of conversations.

    Attributes:
        by: `kind`, `turn` or `context`.
        order: of the part among others.
        num_tokens: of each conversation.
        shares: [M], their expected parts of iterations, for each K, of each conversation.
    """

    by: str
    name: str
    order: int
    num_tokens: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    shares: dict[Hashable, Floats] = field(default_factory=dict)

    def tokens_per_iteration(self, num_draft_tokens: int) -> Interval:
        """Tokens over their parts of iterations, with a 95 % interval over conversations."""
        shares = [own[num_draft_tokens - 1] for own in self.shares.values()]
        return skewed_ratio_of_totals([*self.num_tokens.values()], shares, unit="conversation")


def parts_of(
    turns: Sequence[tuple[Reading, int]],
    read: Sequence[ReadText],
    conversations: Sequence[Hashable],
) -> list[Part]:
    """The parts of turns, each the answer at a place of a reading, that were read.

    An iteration is divided among the tokens that it decides, whatever their kinds.
    """
    parts: dict[tuple[str, str], Part] = {}
    for (reading, place), text, conversation in zip(turns, read, conversations, strict=True):
        for by, name, order, members in _divided(reading, place):
            part = parts.setdefault((by, name), Part(by, name, order))
            part.num_tokens[conversation] += len(members)
            shares = text.cut.shares[:, members].sum(axis=1)
            part.shares[conversation] = part.shares.get(conversation, 0.0) + shares
    order_of = ("kind", "turn", "context")
    return sorted(parts.values(), key=lambda part: (order_of.index(part.by), part.order))


def _divided(reading: Reading, place: int) -> Iterator[tuple[str, str, int, NDArray[np.intp]]]:
    """Parts of a turn: by what, name, order, and the numbers of their tokens, 0 for the one after the first."""
    answer = reading.transcript.answers[place]
    turn = reading.turns[place]
    kinds = np.array(turn.kinds[1:], dtype=object)
    for order, kind in enumerate(get_args(Kind)):
        if (members := np.flatnonzero(kinds == kind)).size:
            yield "kind", kind, order, members
    name, exponent = _range(turn.number or 1)
    yield "turn", name, exponent, np.arange(len(answer) - 1)
    # The context of a token is all before it.
    exponents = np.log2(np.arange(answer.start + 1, answer.stop)).astype(int)
    for exponent in np.unique(exponents).tolist():
        name, _ = _range(2**exponent)
        yield "context", name, exponent, np.flatnonzero(exponents == exponent)


def _range(number: int) -> tuple[str, int]:
    """The range between powers of two that has a number, `4 to 7`, and the exponent of its beginning."""
    exponent = number.bit_length() - 1
    first, last = 2**exponent, 2 ** (exponent + 1) - 1
    return (f"{first:,} to {last:,}" if exponent else "1"), exponent
