"""Turns of conversations: what is accepted in the first ones, and in later ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.results.rows.acceptance import AcceptanceTextRow
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


def parts_of(texts: Sequence[AcceptanceTextRow]) -> list[Part]:
    """The parts of turns, by their numbers: 1, 2 to 3, 4 to 7 and so on."""
    parts: dict[int, Part] = {}
    for text in texts:
        exponent = (text.turn or 1).bit_length() - 1
        first, last = 2**exponent, 2 ** (exponent + 1) - 1
        name = f"{first:,} to {last:,}" if exponent else "1"
        part = parts.setdefault(exponent, Part(name))
        iterations = np.array(text.iterations_by_num_draft_tokens)
        part.num_tokens[text.prompt_index] += text.num_tokens or 0
        part.iterations[text.prompt_index] = (
            part.iterations.get(text.prompt_index, 0.0) + iterations
        )
    return [part for _, part in sorted(parts.items())]
