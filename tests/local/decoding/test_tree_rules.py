"""The rule for trees keeps the target's distribution, on random trees; a broken twin of it is caught."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from scipy import stats
from torch import Tensor

from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.tree_rules import TreeOffer, TreeRule, TreeVerdict, verify_rounds
from harness.local.decoding.trees import Parents, TreeShape, chain_of
from harness.local.decoding.verify import Offer, verify
from harness.local.decoding.warp import Warp
from verifiers import FALSE_ALARM_RATE, arguments

SIZE = 4
NUM_DRAWS = 20_000
WARM = Warp(0.5)


def random_tree(seed: int, num_nodes: int = 6) -> Parents:
    """No node has more children than there are tokens."""
    numbers = random.Random(seed)
    parents: list[int] = []
    while len(parents) < num_nodes:
        parent = numbers.randint(0, len(parents))
        if parents.count(parent) < SIZE:
            parents.append(parent)
    return tuple(parents)


def markov_chain(seed: int) -> Tensor:
    """The distributions after each token; the last one is after the text."""
    weights = torch.rand(SIZE + 1, SIZE, generator=torch.Generator().manual_seed(seed)) ** 2
    return weights / weights.sum(-1, keepdim=True)


class Trees:
    """Many offers of trees of one shape over a Markov chain; every third row is cut to one level.

    The draft is another chain, whose likeliest tokens are the nodes.
    """

    def __init__(self, seed: int, *, warp: Warp | None = None) -> None:
        parents = random_tree(seed)
        self._generator = torch.Generator().manual_seed(seed)
        chain = markov_chain(seed)
        self.target = chain if warp is None else warp(chain.log())
        tokens = self._tokens(parents, markov_chain(seed + 100))
        self.parents = parents
        shape = TreeShape([parents] * NUM_DRAWS).on(tokens.device)
        limits = torch.where(torch.arange(NUM_DRAWS) % 3 == 0, 1, len(parents)).unsqueeze(1)
        self.offer = TreeOffer(
            self.target[tokens],
            tokens[:, 1:],
            self._uniforms(len(parents)),
            self._uniforms(len(parents) + 1),
            shape.depths[:, 1:] <= limits,
            *shape,
        )

    def _uniforms(self, *shape: int) -> Tensor:
        return torch.rand(NUM_DRAWS, *shape, generator=self._generator)

    def _tokens(self, parents: Parents, draft: Tensor) -> Tensor:
        """The last token of the text, then the nodes."""
        tokens = torch.full((NUM_DRAWS, 1), SIZE)
        for node, parent in enumerate(parents):
            num_siblings = parents[:node].count(parent)
            after = draft[tokens[:, parent]]
            new = after.argsort(dim=1, descending=True)[:, num_siblings]
            tokens = torch.cat([tokens, new.unsqueeze(1)], dim=1)
        return tokens

    def p_value(self, rule: TreeRule) -> float:
        """Chi-square over the first two tokens; the target draws the second one after a verdict that gives one."""
        verdict = rule(self.offer)
        rows = torch.arange(NUM_DRAWS)
        on_path = self.offer.ancestors[rows, verdict.last_node][:, 1:]
        order = on_path.int().sort(dim=1, descending=True, stable=True).indices
        path = self.offer.draft_tokens.gather(1, order)
        first = torch.where(verdict.num_accepted > 0, path[:, 0], verdict.next_token)
        second = inverse_cdf(self.target[first], self._uniforms())
        second = torch.where(verdict.num_accepted == 1, verdict.next_token, second)
        second = torch.where(verdict.num_accepted > 1, path[:, 1], second)
        exact = (self.target[SIZE].unsqueeze(1) * self.target[:SIZE]).flatten().double()
        counts = (first * SIZE + second).bincount(minlength=SIZE * SIZE)
        expected = NUM_DRAWS * exact / exact.sum()
        return float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("warp", [None, WARM])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_keeps_the_target_s_distribution(seed: int, warp: Warp | None) -> None:
    """False-alarm rate 1e-9."""
    assert Trees(seed, warp=warp).p_value(verify_rounds) > FALSE_ALARM_RATE


def verify_without_removal(offer: TreeOffer) -> TreeVerdict:
    """A broken rule: a rejected token stays in what is left of the target."""
    rows = torch.arange(len(offer.parents))
    last_node = torch.zeros_like(rows)
    for node in range(1, offer.parents.shape[1] + 1):
        parent, token = offer.parents[:, node - 1], offer.draft_tokens[:, node - 1]
        passes = (
            offer.accept_uniforms[:, node - 1] < offer.target_probabilities[rows, parent, token]
        )
        is_tested = offer.children_of(last_node)[:, node - 1]
        last_node = torch.where(is_tested & passes, node, last_node)
    depth = offer.depths[rows, last_node]
    weights = offer.target_probabilities[rows, last_node]
    return TreeVerdict(last_node, depth, inverse_cdf(weights, offer.next_uniforms[rows, depth]))


def test_duplicate_siblings_count_once() -> None:
    """A rule that leaves a rejected token in the target accepts it twice as often, and is caught."""
    trees = Trees(2)
    tokens = trees.offer.draft_tokens.clone()
    siblings = [node for node, parent in enumerate(trees.parents) if parent == 0]
    tokens[:, siblings] = tokens[:, siblings[:1]]
    drawn = torch.cat([torch.full((NUM_DRAWS, 1), SIZE), tokens], dim=1)
    trees.offer = dataclasses.replace(
        trees.offer, draft_tokens=tokens, target_probabilities=trees.target[drawn]
    )
    assert len(siblings) > 1
    assert trees.p_value(verify_rounds) > FALSE_ALARM_RATE
    assert trees.p_value(verify_without_removal) < FALSE_ALARM_RATE


def test_on_a_tree_of_width_1_the_rule_is_that_of_chains() -> None:
    target, tokens, _, accept, following = arguments(5_000, 4)
    lengths = torch.arange(5_000) % 5
    plain = verify(Offer(target, tokens, None, accept, following, lengths=lengths))
    shape = TreeShape([chain_of(4)] * 5_000).on(tokens.device)
    offered = torch.arange(4) < lengths.unsqueeze(1)
    of_tree = verify_rounds(TreeOffer(target, tokens, accept, following, offered, *shape))
    assert torch.equal(plain.num_accepted, of_tree.num_accepted)
    assert torch.equal(plain.next_token, of_tree.next_token)


def test_greedy_decoding_follows_the_path_of_the_target_s_tokens() -> None:
    """Text 4, then 1 0 2; node 3 is behind a sibling of the first token."""
    following = {4: 1, 1: 0, 0: 2, 2: 3, 3: 3}
    parents = (0, 0, 1, 2, 4, 4)
    tokens = torch.tensor([[4, 3, 1, 0, 0, 1, 2]])
    target = torch.zeros(1, 7, SIZE + 1)
    for place, token in enumerate(tokens[0].tolist()):
        target[0, place, following[token]] = 1
    shape = TreeShape([parents]).on(tokens.device)
    offered = torch.ones(1, 6, dtype=torch.bool)
    numbers = torch.full((1, 7), 0.99)
    offer = TreeOffer(target, tokens[:, 1:], numbers[:, 1:], numbers, offered, *shape)
    verdict = verify_rounds(offer)
    assert (int(verdict.last_node), int(verdict.num_accepted)) == (6, 3)
    assert int(verdict.next_token) == 3


@pytest.mark.parametrize(("parents", "node"), [((1,), 1), ((0, -1), 2), ((0, 1, 3), 3)])
def test_a_node_whose_parent_is_not_before_it_is_refused(parents: Parents, node: int) -> None:
    with pytest.raises(ValueError, match=f"node {node} of a tree cannot have the parent"):
        TreeShape([parents])


def test_nodes_below_the_limit_of_a_row_are_not_offered() -> None:
    shape = TreeShape([(0, 0, 1)] * 2, limits=[3, 1])
    assert shape.depths.tolist() == [[0, 1, 1, 2], [0, 1, 1, 1]]
    assert shape.num_offered == [3, 2]
