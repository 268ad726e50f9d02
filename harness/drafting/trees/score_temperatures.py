"""The temperatures at which the nodes of dynamic trees are scored (`draft.score_temperature`).

A tree of the nodes that are likeliest to be reached is only as good as the draft's probabilities.
One temperature makes a softmax say how often it is right (Guo et al. 2017, arXiv:1706.04599). Which
one depends on the draft, on the text, and on the temperature at which the target draws, so each row
learns its own from what was decided.

Say a draft gives two tokens 0.7 and 0.3 at temperature 1, so 0.9998 and 0.0002 at 0.1, and 0.64 and
0.36 at 1.5. A row whose text always follows the first of them soon chooses 0.1, and its trees
become deep and narrow. A row that follows both equally often chooses 1.5, and its trees become
wide.

The drafters of trees have one `ScoreTemperatures` per batch: it gives the temperatures before trees
grow (`of_rows`), keeps the trees (`remember`), and learns from their verdict (`observe`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.transfer import to_device
from harness.decoding.warp import AnyWarp, CommonWarp, RowWarp, Warp, current_warp
from harness.drafting.trees.growth import Grown

ScoreTemperature = float | Literal["auto"]

# The temperatures that `auto` chooses from.
CANDIDATES = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5)

# A row begins with a temperature between that of a good draft and 1, which EAGLE-2 has. The weight
# is small, so that a few tokens outweigh it.
_FIRST = 0.4
_WEIGHT_OF_FIRST = 0.5

# How much of the evidence is left after each further verdict: texts change.
_MEMORY = 0.8

# A token has at least this chance, whatever the draft says. Otherwise a single mistake of a draft
# that was sure would count more than all that it predicted.
_LEAST_CHANCE = 0.01

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _RememberedTree:
    """A row's tree of N nodes, until its verdict.

    Attributes:
        tokens, parents: [N], as in `Grown`.
        confidences: [N, C], as in `Grown`, at the C temperatures of `CANDIDATES`.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    confidences: Floats

    def log_likelihoods(self, decided: Sequence[int]) -> Floats:
        """Return how likely the tree made the decided tokens at each of `CANDIDATES`, as
        logarithms.

        Only the tokens on a path of the tree count, and the first one that leaves it. With the
        decided tokens a, b and c, in a tree where a has the only child d: the chance of a, times
        the chance that something else than d follows it.
        """
        children: dict[int, dict[int, int]] = {}  # the place of each child, by parent and token
        for place, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            children.setdefault(parent, {}).setdefault(token, place)
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
            place = following[token]
            total += np.maximum(self.confidences[place], math.log(_LEAST_CHANCE))
            node = place + 1
        return total


class ScoreTemperatures:
    """The temperature of each row of a batch.

    With `auto` it depends on nothing but the row's own past: its trees and the tokens that
    followed. So the trees stay functions of the texts, and verification lossless.

    Args:
        setting: `auto`; or a number: rows are then scored at the temperature that they are drawn
            at, but at no lower one than this.
    """

    def __init__(self, setting: ScoreTemperature) -> None:
        self._setting = setting
        # For each row how well each of `CANDIDATES` predicted its tokens of late.
        self._evidence: list[Floats] = []
        self._trees: list[_RememberedTree] = []  # of the last proposal; empty without one

    def add(self, num_rows: int) -> None:
        """Add rows behind the others."""
        distances = np.log(CANDIDATES) - math.log(_FIRST)
        self._evidence += [-_WEIGHT_OF_FIRST * distances**2] * num_rows
        self._trees = []

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows only, in this order."""
        self._evidence = [self._evidence[row] for row in rows]
        self._trees = []

    def of_rows(self, warp: AnyWarp, device: torch.device) -> Tensor:
        """Return the temperatures [B] of the trees that grow now.

        Args:
            warp: what the rows' tokens are drawn with.
        """
        if self._setting == "auto":
            learned = [CANDIDATES[int(evidence.argmax())] for evidence in self._evidence]
            return to_device(learned, device, torch.float32)
        temperatures = [max(drawn_at, self._setting) for drawn_at in temperatures_of(warp)]
        if len(temperatures) == 1:
            temperatures *= len(self._evidence)
        return to_device(temperatures, device, torch.float32)

    def remember(self, grown: Grown) -> None:
        """Keep trees that have grown until their verdict, with `auto`."""
        if grown.confidences is None:
            return
        assert grown.parents is not None
        confidences = grown.confidences.double().cpu().numpy()
        rows = zip(grown.tokens.tolist(), grown.parents.tolist(), confidences, strict=True)
        self._trees = [_RememberedTree(*row) for row in rows]

    def observe(
        self, proposed: Tensor, num_accepted: Sequence[int], next_tokens: Sequence[int]
    ) -> None:
        """Learn that of proposed tokens [B, n] the first num_accepted[b] were decided, and
        next_tokens[b] after them.
        """
        if not self._trees:
            return
        rows = zip(self._trees, proposed.tolist(), num_accepted, next_tokens, strict=True)
        for row, (tree, path, count, following) in enumerate(rows):
            likelihoods = tree.log_likelihoods([*path[:count], following])
            self._evidence[row] = _MEMORY * self._evidence[row] + likelihoods
        self._trees = []


def temperatures_of(warp: AnyWarp) -> list[float]:
    """Return the temperatures of a batch's rows, or the only one if they share it."""
    current = current_warp(warp)
    assert not isinstance(current, CommonWarp)  # drafts with another tokenizer have no trees
    rows: Sequence[Warp] = current.rows if isinstance(current, RowWarp) else [current]
    return [row.temperature for row in rows]
