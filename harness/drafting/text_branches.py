"""Joins what a row's text says, as a branch, with the tree that a head drafts, within its budget.

`tree_growth` calls this when `hybrid_trees` gives it branches. The tree keeps the nodes that are
likeliest to be reached and accepted, whether they come from the text or from the head. Say the text
goes on with `the cat sat` and a token of it is right with a chance of 0.5: its nodes count 0.5,
0.25 and 0.125. The head says `the` 0.8, then `dog` 0.3, and `a` 0.2. Within a budget of four nodes:

    the 0.8
    |-- dog 0.3
    `-- cat 0.25
    a 0.2           sat 0.125 has no place

There are two ways to join them. `merged`, for trees that follow from the texts alone, is this
example: both share the node `the`. `beside`, for drawn trees, puts the branch before the head's
nodes as an elder sibling, because what was drawn must stay as it was drawn.
`tree_rules.verify_rounds` says why that is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from harness.decoding.trees import Parents, TreeProposal, TreeShape


class TextBranch(NamedTuple):
    """The continuation of one row's text, one token below the other.

    Attributes:
        tokens: empty where the text has no guess.
        chance: the chance that one of them is right, if those before it are; in (0, 1).
    """

    tokens: Sequence[int] = ()
    chance: float = 0.5

    def values(self) -> list[float]:
        """Return the chance that each token is reached and right: 0.5, 0.25, 0.125, ..."""
        return [self.chance ** (place + 1) for place in range(len(self.tokens))]


def merged(
    proposal: TreeProposal, values: Sequence[Sequence[float]], branches: Sequence[TextBranch]
) -> TreeProposal:
    """Merge trees that follow from the texts alone with branches: where both agree they share
    nodes.

    Args:
        proposal: trees of N nodes. Those that are returned have as many.
        values: [B, N], the chance that each node is reached and accepted.
        branches: one per row.
    """
    num_nodes = proposal.shape.num_nodes
    unions: list[_Union] = []
    trees = zip(proposal.tokens.tolist(), proposal.shape.parents, values, strict=True)
    for (tokens, parents, of_nodes), branch in zip(trees, branches, strict=True):
        union = _Union()
        union.add_tree(branch.tokens, range(len(branch.tokens)), branch.values())
        union.add_tree(tokens, parents, of_nodes)
        unions.append(union.best(num_nodes))
    device = proposal.tokens.device
    tokens_of_all = torch.tensor([union.tokens for union in unions], device=device)
    return TreeProposal(tokens_of_all, TreeShape([tuple(union.parents) for union in unions]))


class _Union:
    """Trees of one row, merged where they begin alike. A node that several of them have counts as
    much as in the best of them. Nodes are numbered from 1, and 0 is the root.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._values: list[float] = []
        self._numbers: dict[tuple[int, int], int] = {}  # by parent and token

    def add_tree(
        self, tokens: Sequence[int], parents: Sequence[int], values: Sequence[float]
    ) -> None:
        """Add the nodes of a tree, parents before their children."""
        numbers = [0]  # of the root and the nodes of this tree, in the union
        for token, parent, value in zip(tokens, parents, values, strict=True):
            numbers.append(self._add(numbers[parent], token, value))

    def _add(self, parent: int, token: int, value: float) -> int:
        number = self._numbers.setdefault((parent, token), len(self.tokens) + 1)
        if number > len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self._values.append(value)
        self._values[number - 1] = max(self._values[number - 1], value)
        return number

    def best(self, num_nodes: int) -> _Union:
        """Return the tree of the nodes that count most.

        Where there are fewer, the first token is repeated: no rule accepts it a second time.
        """
        # Stable: a parent comes before a child that counts the same.
        order = sorted(range(len(self.tokens)), key=lambda place: -self._values[place])
        kept = sorted(order[:num_nodes])
        best = _Union()
        new_numbers: dict[int, int] = {}
        for place in kept:
            parent = new_numbers.get(self.parents[place], 0)  # the root stays 0
            new_numbers[place + 1] = best._add(parent, self.tokens[place], self._values[place])
        missing = num_nodes - len(kept)
        best.tokens += best.tokens[:1] * missing
        best.parents += [0] * missing
        return best


def beside(
    proposal: TreeProposal, values: Sequence[float], branches: Sequence[TextBranch]
) -> TreeProposal:
    """Put branches before drawn trees of one shape, whose root's children were drawn without each
    branch's first token.

    The branch takes the place of the nodes that count least, which are the last ones. Those that
    stay were drawn without replacement as before, in the same order. Say the nodes a, b, c and d
    count 0.8, 0.64, 0.3 and 0.1, and the two tokens t and u of a branch 0.6 and 0.36: then t, u, a
    and b stay.

    Args:
        proposal: trees of N nodes. Those that are returned have as many.
        values: [N], the chance that each node is reached and accepted, falling.
        branches: one per row.
    """
    assert proposal.probabilities is not None
    num_nodes = proposal.shape.num_nodes
    device = proposal.tokens.device
    lengths = [_num_from_text(values, branch) for branch in branches]
    tokens: list[list[int]] = []
    shapes: list[Parents] = []
    # For the root and each node, which distribution of the drawn tree follows it.
    following: list[list[int]] = []
    rows = zip(proposal.tokens.tolist(), proposal.shape.parents, branches, lengths, strict=True)
    for drawn, parents, branch, length in rows:
        num_drawn = num_nodes - length
        tokens.append([*branch.tokens[:length], *drawn[:num_drawn]])
        below = [parent + length if parent else 0 for parent in parents[:num_drawn]]
        shapes.append((*range(length), *below))
        # -1 is a distribution of zeros: nothing is drawn after the text's nodes.
        following.append([0, *[-1] * length, *range(1, num_drawn + 1)])
    with_zeros = functional.pad(proposal.probabilities, (0, 0, 0, 1))
    index = torch.arange(len(tokens), device=device).unsqueeze(1)
    probabilities = with_zeros[index, torch.tensor(following, device=device)]
    places = torch.arange(num_nodes, device=device)
    certain = places < torch.tensor(lengths, device=device).unsqueeze(1)
    tokens_of_all = torch.tensor(tokens, device=device)
    return TreeProposal(tokens_of_all, TreeShape(shapes), probabilities, certain)


def _num_from_text(values: Sequence[float], branch: TextBranch) -> int:
    """Return how many of a branch's tokens are among the nodes that count most.

    Each takes the place of the node that then counts least: the last, the last but one, and so on.
    """
    length = 0
    for value, displaced in zip(branch.values(), reversed(values), strict=False):
        if value <= displaced:
            break
        length += 1
    return length
