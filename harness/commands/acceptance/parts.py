"""Turns of conversations: what is accepted in the first ones, and in later ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from harness.engines.door.reading import ReadText
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import log_ratio


@dataclass
class Part:
    """A range of turns of conversations.

    Attributes:
        num_tokens: of each conversation.
        iterations: [M], for each K, of each conversation.
    """

    name: str
    num_tokens: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    iterations: dict[Hashable, Floats] = field(default_factory=dict)

    def tokens_per_iteration(self, num_draft_tokens: int) -> Interval:
        """With a 95 % interval over conversations."""
        iterations = [by_k[num_draft_tokens - 1] for by_k in self.iterations.values()]
        return log_ratio([[*self.num_tokens.values()]], [iterations], "conversation", skewed=True)


def parts_of(
    turns: Sequence[int], texts: Sequence[ReadText], conversations: Sequence[Hashable]
) -> list[Part]:
    """The parts of turns, by their numbers."""
    parts: dict[int, Part] = {}
    for turn, text, conversation in zip(turns, texts, conversations, strict=True):
        exponent = turn.bit_length() - 1
        first, last = 2**exponent, 2 ** (exponent + 1) - 1
        name = f"{first:,} to {last:,}" if exponent else "1"
        part = parts.setdefault(exponent, Part(name))
        part.num_tokens[conversation] += text.cut.num_tokens
        part.iterations[conversation] = part.iterations.get(conversation, 0.0) + text.cut.iterations
    return [part for _, part in sorted(parts.items())]
