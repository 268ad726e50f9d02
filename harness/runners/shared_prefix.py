"""Prompts that begin alike, as few-shot questions do: their common beginning is read once for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Runner


class SharedPrefixRunner:
    """A `Runner` over another one: `start` reads the common beginning once, then every prompt's own end.

    The other runner reads a batch of equal prompts once, and takes back what pads the shorter ends.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See `Runner.start`."""
        # The last token of every prompt is left for its end, because the logits after it are wanted.
        num_shared = min(_common_length(min(map(list, prompts)), max(map(list, prompts))), min(map(len, prompts)) - 1)
        if len(prompts) == 1 or num_shared == 0:
            return self._runner.start(prompts)
        device = self._runner.start([prompts[0][:num_shared]] * len(prompts)).device
        ends = [list(prompt[num_shared:]) for prompt in prompts]
        lengths = list(map(len, ends))
        padded = [end + [0] * (max(lengths) - len(end)) for end in ends]
        logits = self._runner.extend(torch.tensor(padded, device=device))
        self._runner.keep(lengths)
        return logits[torch.arange(len(ends), device=device), torch.tensor(lengths, device=device) - 1]

    def extend(self, tokens: Tensor) -> Tensor:
        """See `Runner.extend`."""
        return self._runner.extend(tokens)

    def keep(self, counts: Sequence[int]) -> None:
        """See `Runner.keep`."""
        self._runner.keep(counts)

    def select(self, rows: Sequence[int]) -> None:
        """See `Runner.select`."""
        self._runner.select(rows)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with; of the smallest and the largest prompt that is what all begin with."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
