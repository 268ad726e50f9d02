"""The temperatures at which the nodes of dynamic trees are scored.

A tree of the nodes that are likeliest to be reached is only as good as the draft's probabilities. A
softmax is made to say how often it is right by one temperature (Guo et al. 2017, arXiv:1706.04599).
Which one that is depends on the draft, on the text, and on the temperature at which the target draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.transfer import to_device
from harness.drafting.tree_growth import Grown

ScoreTemperature = float | Literal["auto"]

# The temperatures that `auto` chooses from.
CANDIDATES = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5)

# A row begins between that of a good draft and EAGLE-2's, which is 1, and leaves it easily.
_FIRST = 0.4
_WEIGHT_OF_FIRST = 0.5

# Of what is learned the earlier counts less and less: texts change.
_MEMORY = 0.8

# A token has at least this chance, whatever the draft says. Otherwise a single mistake of a draft
# that was sure would count more than all that it predicted.
_LEAST_CHANCE = 0.01

Floats = NDArray[np.float64]


class _LookedAt(NamedTuple):
    """A row's tree, until its verdict: as in `Grown`."""

    tokens: Sequence[int]
    parents: Sequence[int]
    confidences: Floats

    def log_likelihoods(self, decided: Sequence[int]) -> Floats:
        """Return the logarithm of the chance, at each of `CANDIDATES`, of the decided tokens that the
        tree knows, and of the first one that it does not know.
        """
        children: dict[int, dict[int, int]] = {}
        for number, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            children.setdefault(parent, {}).setdefault(token, number)
        total = np.zeros(len(CANDIDATES))
        node = 0
        for token in decided:
            following = children.get(node)
            if following is None:
                break
            if token not in following:
                known = np.exp(self.confidences[list(following.values())]).sum(0)
                total += np.log(np.maximum(1 - known, _LEAST_CHANCE))
                break
            number = following[token]
            total += np.maximum(self.confidences[number], math.log(_LEAST_CHANCE))
            node = number + 1
        return total


class _RowRecord:
    """How well each of `CANDIDATES` predicted the tokens of a row of late."""

    def __init__(self) -> None:
        steps = np.log(CANDIDATES) - math.log(_FIRST)
        self._evidence = -_WEIGHT_OF_FIRST * steps**2

    @property
    def temperature(self) -> float:
        """The best one."""
        return CANDIDATES[int(self._evidence.argmax())]

    def learn(self, tree: _LookedAt, decided: Sequence[int]) -> None:
        """Compare a tree with the tokens that were decided instead of it."""
        self._evidence = _MEMORY * self._evidence + tree.log_likelihoods(decided)


class ScoreTemperatures:
    """The temperature of each row of a batch.

    With `auto` it depends on nothing but the row's own past: its trees and the tokens that followed.
    So the trees stay functions of the texts, and verification lossless.

    Args:
        setting: the lowest temperature of a row, which otherwise has that of its draws; or `auto`.
    """

    def __init__(self, setting: ScoreTemperature) -> None:
        self._setting = setting
        self._records: list[_RowRecord] = []
        self._trees: list[_LookedAt] = []  # of the last proposal; empty without one

    def add(self, num_rows: int) -> None:
        """Add rows behind the others."""
        self._records += [_RowRecord() for _ in range(num_rows)]
        self._trees = []

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows only, in this order."""
        self._records = [self._records[row] for row in rows]
        self._trees = []

    def of_rows(self, warp: Any, device: torch.device) -> Tensor:
        """Return the temperatures [B] of the trees that grow now.

        Args:
            warp: what the rows' tokens are drawn with.
        """
        if self._setting == "auto":
            learned = [row.temperature for row in self._records]
            return to_device(learned, device, torch.float32)
        temperatures = [max(own, self._setting) for own in temperatures_of(warp)]
        if len(temperatures) == 1:
            temperatures *= len(self._records)
        return to_device(temperatures, device, torch.float32)

    def remember(self, grown: Grown) -> None:
        """Keep the trees until their verdict, where something is learned from it."""
        if grown.confidences is None:
            return
        assert grown.parents is not None
        confidences = grown.confidences.double().cpu().numpy()
        rows = zip(grown.tokens.tolist(), grown.parents.tolist(), confidences, strict=True)
        self._trees = [_LookedAt(*row) for row in rows]

    def observe(
        self, proposed: Tensor, num_accepted: Sequence[int], next_tokens: Sequence[int]
    ) -> None:
        """Learn that of proposed tokens [B, n] the first num_accepted[b] were decided, and
        next_tokens[b] after them.
        """
        if not self._trees:
            return
        rows = zip(
            self._records, self._trees, proposed.tolist(), num_accepted, next_tokens, strict=True
        )
        for record, tree, path, count, following in rows:
            record.learn(tree, [*path[:count], following])
        self._trees = []


def temperatures_of(warp: Any) -> list[float]:
    """Return the temperatures of a batch's rows, or the one that they share."""
    current = getattr(warp, "current", warp)
    rows = getattr(current, "rows", [current])
    return [row.temperature for row in rows]
