"""Trees of sequences (`draft.tree=sequences`): drawn independently of each other, and merged.

`tree_plan` chooses this growth above temperature 0. Say the budget is six nodes and trees have
three levels: then two sequences are drawn, and `a b c` and `a d e` become a tree of five nodes,
with b and d as the children of a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from harness.decoding.randomness import existing_index
from harness.decoding.trees import TreeProposal, TreeShape
from harness.decoding.warp import AnyWarp
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
        num_sequences: n, the sequences of each row.
        depth: K, the tokens of a sequence.
        warp: what tokens are drawn with.
    """

    num_sequences: int
    depth: int
    warp: AnyWarp

    def grow(self, predictor: Predictor, draws: Draws) -> Grown:
        """Tokens are [B, n, K], and the distributions of each [B, n, K, V]."""
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
                # The root is alone in its level; from then on each sequence goes on by itself.
                parents = torch.zeros_like(itself) if level == 1 else itself
                logits = predictor.expand(tokens[-1], parents)
            probabilities = self.warp(logits).expand(-1, count, -1)
            distributions.append(probabilities)
            tokens.append(existing_index(probabilities, numbers[:, level]))
        return Grown(torch.stack(tokens, dim=2), torch.stack(distributions, dim=2))

    def trees(self, grown: Grown, branches: Sequence[TextBranch]) -> TreeProposal:
        """Sequences are not joined with texts."""
        return _merge(grown.tokens, grown.chosen_by)


def _merge(tokens: Tensor, distributions: Tensor) -> TreeProposal:
    """Merge sequences [B, n, K], whose tokens were drawn from distributions [B, n, K, V]."""
    tries = [_Trie(sequences) for sequences in tokens.tolist()]
    num_nodes = max(len(trie.tokens) for trie in tries)
    for trie in tries:
        trie.fill(num_nodes)
    # Behind the last distribution there are zeros, for leaves.
    with_zeros = functional.pad(distributions.flatten(1, 2), (0, 0, 0, 1))
    rows = torch.arange(len(tries), device=tokens.device).unsqueeze(1)
    following = torch.tensor([trie.following for trie in tries], device=tokens.device)
    return TreeProposal(
        torch.tensor([trie.tokens for trie in tries], device=tokens.device),
        TreeShape([tuple(trie.parents) for trie in tries]),
        with_zeros[rows, following],
    )


class _Trie:
    """The sequences of one row as one tree.

    Attributes:
        tokens, parents: of the nodes, in the order in which they were first drawn; parents as in a
            `TreeShape`.
        following: for the root and each node, the number of the distribution after it, where those
            of all sequences are numbered one after the other from 0; -1 for a leaf. Sequences that
            share a node have the same distribution after it, so the first one's serves.
    """

    def __init__(self, sequences: list[list[int]]) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.following = [0]
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        number = 0
        for sequence in sequences:
            parent = 0
            for level, token in enumerate(sequence, start=1):
                number += 1
                if (parent, token) not in nodes:
                    self._add(parent, token, number if level < len(sequence) else -1)
                    nodes[parent, token] = len(self.tokens)
                parent = nodes[parent, token]

    def _add(self, parent: int, token: int, following: int) -> None:
        self.parents.append(parent)
        self.tokens.append(token)
        self.following.append(following)

    def fill(self, num_nodes: int) -> None:
        """Repeat the first token: no rule tests a token of draws without replacement again."""
        while len(self.tokens) < num_nodes:
            self._add(0, self.tokens[0], -1)
