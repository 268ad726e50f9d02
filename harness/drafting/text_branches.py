"""What a row's text says, as a branch of the tree that a head drafts, within the same budget.

A tree of nodes that are likeliest to be reached has as many of the text's tokens as belong there: the
i-th counts with the i-th power of the chance that the text is right, a node of the head with the
value that it has without the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from harness.decoding.transfer import to_device
from harness.decoding.trees import Parents, TreeProposal, TreeShape


class TextBranch(NamedTuple):
    """The continuation of one row's text.

    Attributes:
        tokens: none where the text has no guess.
        chance: that one of them is right, if those before it are; in (0, 1).
    """

    tokens: Sequence[int] = ()
    chance: float = 0.5

    def values(self) -> list[float]:
        """The chance that each token is reached and right."""
        return [self.chance ** (place + 1) for place in range(len(self.tokens))]


def merged(
    proposal: TreeProposal, values: Sequence[Sequence[float]], branches: Sequence[TextBranch]
) -> TreeProposal:
    """Join trees that follow from the texts alone with branches, node by node where they agree.

    Args:
        proposal: trees [B, N]; so are those that are returned.
        values: [B, N] of their nodes, none above its parent's.
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
    """Trees of one row, merged where they begin alike; each node counts as much as in the best of
    them.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._values: list[float] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def add_tree(
        self, tokens: Sequence[int], parents: Sequence[int], values: Sequence[float]
    ) -> None:
        """Add the nodes of a tree, parents before their children."""
        numbers = [0]
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
        """The tree of the nodes that count most.

        Where there are fewer, the first token is repeated: no rule accepts it a second time.
        """
        # Stable: a parent comes before a child that counts the same.
        order = sorted(range(len(self.tokens)), key=lambda place: -self._values[place])
        chosen = sorted(order[:num_nodes])
        tokens = [self.tokens[place] for place in chosen]
        parents = [self.parents[place] for place in chosen]
        values = [self._values[place] for place in chosen]
        new_numbers = {place + 1: number for number, place in enumerate(chosen, start=1)}
        best = _Union()
        best.add_tree(tokens, [new_numbers.get(parent, 0) for parent in parents], values)
        missing = num_nodes - len(chosen)
        best.tokens += tokens[:1] * missing
        best.parents += [0] * missing
        return best


def beside(
    proposal: TreeProposal, values: Sequence[float], branches: Sequence[TextBranch]
) -> TreeProposal:
    """Put branches before drawn trees of one shape, whose root's children were drawn without each
    branch's first token.

    What the branch takes of the budget is taken from the nodes that count least, which are the last
    ones: what is left was drawn without replacement as well, in the same order.

    Args:
        proposal: trees [B, N]; so are those that are returned.
        values: [N] of their nodes, falling.
    """
    assert proposal.probabilities is not None
    num_nodes = proposal.shape.num_nodes
    device = proposal.tokens.device
    lengths = [_num_of_text(values, branch) for branch in branches]
    tokens: list[list[int]] = []
    shapes: list[Parents] = []
    following: list[list[int]] = []
    rows = zip(proposal.tokens.tolist(), proposal.shape.parents, branches, lengths, strict=True)
    for drawn, parents, branch, length in rows:
        num_drawn = num_nodes - length
        tokens.append([*branch.tokens[:length], *drawn[:num_drawn]])
        below = [parent + length if parent else 0 for parent in parents[:num_drawn]]
        shapes.append((*range(length), *below))
        # Behind the last distribution there are zeros: nothing is drawn after the text's nodes.
        following.append([0, *[-1] * length, *range(1, num_drawn + 1)])
    padded = functional.pad(proposal.probabilities, (0, 0, 0, 1))
    index = torch.arange(len(tokens), device=device).unsqueeze(1)
    probabilities = padded[index, torch.tensor(following, device=device)]
    places = torch.arange(num_nodes, device=device)
    certain = places < torch.tensor(lengths, device=device).unsqueeze(1)
    tokens_of_all = torch.tensor(tokens, device=device)
    return TreeProposal(tokens_of_all, TreeShape(shapes), probabilities, certain)


def _num_of_text(values: Sequence[float], branch: TextBranch) -> int:
    """How many of a branch's tokens are among the nodes that count most, as many as `values`."""
    length = 0
    for value in branch.values():
        displaced = values[len(values) - 1 - length] if length < len(values) else 1.0
        if value <= displaced:
            break
        length += 1
    return length


def first_tokens(
    branches: Sequence[TextBranch], num_rows: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the first token of each row's branch [B], and whether there is one [B]; there is none
    without branches.
    """
    of_rows = branches or [TextBranch()] * num_rows
    tokens = [branch.tokens[0] if branch.tokens else 0 for branch in of_rows]
    are_there = [int(bool(branch.tokens)) for branch in of_rows]
    return to_device(tokens, device), to_device(are_there, device) > 0
