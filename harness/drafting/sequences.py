"""Sequences of draft tokens that are drawn independently, and merged to trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.decoding.randomness import existing_index
from harness.decoding.trees import TreeProposal, TreeShape
from harness.drafting.text_branches import TextBranch
from harness.drafting.tree_growth import Draws, Grown, Growth, Predictor


@dataclass(frozen=True)
class SequenceGrowth(Growth):
    """SpecInfer (Miao et al. 2023, arXiv:2305.09781): draw sequences independently of each other,
    and merge their equal beginnings.

    Sequences that draw the same token after a node share one child. In the order in which they were
    first drawn, the children of a node are distributed as if drawn without replacement, however
    many there are: a token that is drawn again says nothing about the next new one. So the rules
    for draws without replacement are lossless.

    Attributes:
        num_sequences: of each row.
        depth: the tokens of a sequence.
        warp: what tokens are drawn with.
    """

    num_sequences: int
    depth: int
    warp: Any

    def grow(self, predictor: Predictor, draws: Draws) -> Grown:
        """See `Growth.grow`. Tokens are [B, n, K], their distributions [B, n, K, V]."""
        num_rows = len(draws.uniforms)
        count = self.num_sequences
        numbers = draws.uniforms[:, : self.depth * count].reshape(num_rows, self.depth, count)
        itself = torch.arange(count, device=numbers.device).expand(num_rows, -1)
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for level in range(self.depth):
            if level == 0:
                logits = predictor.root()
            else:
                parents = torch.zeros_like(itself) if level == 1 else itself
                logits = predictor.expand(tokens[-1], parents)
            probabilities = self.warp(logits).expand(-1, count, -1)
            distributions.append(probabilities)
            tokens.append(existing_index(probabilities, numbers[:, level]))
        return Grown(torch.stack(tokens, dim=2), torch.stack(distributions, dim=2))

    def trees(self, grown: Grown, branches: Sequence[TextBranch]) -> TreeProposal:
        """See `Growth.trees`. Sequences are not joined with texts."""
        return _merge(grown.tokens, grown.chosen_by)


def _merge(tokens: Tensor, distributions: Tensor) -> TreeProposal:
    """Merge sequences [B, n, K], whose tokens were drawn from distributions [B, n, K, V]."""
    tries = [_Trie.of(sequences) for sequences in tokens.tolist()]
    num_nodes = max(len(trie.tokens) for trie in tries)
    for trie in tries:
        trie.fill(num_nodes)
    # Behind the last place there are zeros, for leaves.
    places = functional.pad(distributions.flatten(1, 2), (0, 0, 0, 1))
    rows = torch.arange(len(tries), device=tokens.device).unsqueeze(1)
    following = torch.tensor([trie.following for trie in tries], device=tokens.device)
    return TreeProposal(
        torch.tensor([trie.tokens for trie in tries], device=tokens.device),
        TreeShape([tuple(trie.parents) for trie in tries]),
        places[rows, following],
    )


@dataclass
class _Trie:
    """Sequences of one row, merged where they begin alike.

    Attributes:
        tokens, parents: of the nodes, in the order in which they were drawn.
        following: of the root and of each node: the place, among all tokens of all sequences, that
            was drawn from the distribution after it; -1 for a leaf.
    """

    tokens: list[int]
    parents: list[int]
    following: list[int]

    @classmethod
    def of(cls, sequences: list[list[int]]) -> _Trie:
        trie = cls([], [], [0])
        numbers: dict[tuple[int, int], int] = {}
        place = 0
        for sequence in sequences:
            node = 0
            for level, token in enumerate(sequence, start=1):
                place += 1
                if (node, token) not in numbers:
                    numbers[node, token] = trie.add(node, token)
                    trie.following.append(place if level < len(sequence) else -1)
                node = numbers[node, token]
        return trie

    def add(self, parent: int, token: int) -> int:
        """Add a node, and return its number."""
        self.parents.append(parent)
        self.tokens.append(token)
        return len(self.tokens)

    def fill(self, num_nodes: int) -> None:
        """Repeat the first token: no rule tests a token of draws without replacement again."""
        while len(self.tokens) < num_nodes:
            self.add(0, self.tokens[0])
            self.following.append(-1)
