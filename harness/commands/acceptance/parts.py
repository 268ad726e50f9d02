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
        ends: [M], the iterations that are expected to end with one of them, for each K, of each conversation.
    """

    by: str
    name: str
    order: int
    num_tokens: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    ends: dict[Hashable, Floats] = field(default_factory=dict)

    def add(self, conversation: Hashable, num_tokens: int, ends: Floats) -> None:
        self.num_tokens[conversation] += num_tokens
        self.ends[conversation] = self.ends.get(conversation, 0.0) + ends

    def share_drafted(self, num_draft_tokens: int) -> float:
        """The expected share of tokens that the draft wrote."""
        ends = sum(own[num_draft_tokens - 1] for own in self.ends.values())
        return float(1 - ends / sum(self.num_tokens.values()))

    def tokens_per_iteration(self, num_draft_tokens: int) -> Interval:
        """Tokens over iterations with a 95 % interval over conversations; unknown where no iteration ends."""
        ends = [own[num_draft_tokens - 1] for own in self.ends.values()]
        if not sum(ends):
            return Interval()
        # This way round: a conversation may have such tokens and no end.
        found = skewed_ratio_of_totals(ends, [*self.num_tokens.values()], unit="conversation")
        return Interval(1 / found.estimate, 1 / found.high, 1 / found.low, found.covers)


def parts_of(
    turns: Sequence[tuple[Reading, int]],
    read: Sequence[ReadText],
    conversations: Sequence[Hashable],
) -> list[Part]:
    """The parts of turns, each the answer at a place of a reading, that were read.

    An iteration counts where it ends: the target itself wrote that token, because the draft had another one there, or
    none.
    """
    parts: dict[tuple[str, str], Part] = {}
    for (reading, place), text, conversation in zip(turns, read, conversations, strict=True):
        ends = text.cut.ends
        for by, name, order, members in _divided(reading, place):
            part = parts.setdefault((by, name), Part(by, name, order))
            part.add(conversation, len(members), ends[:, members].sum(axis=1))
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
