"""Rules for trees keep the target's distribution, on random trees; broken twins of them are caught."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from harness.decoding import tree_rules
from harness.decoding.randomness import inverse_cdf
from harness.decoding.rules import verify_block
from harness.decoding.tree_rules import (
    TreeOffer,
    TreeRule,
    verify_eagle,
    verify_rounds,
    verify_traversal,
)
from harness.decoding.trees import Parents, TreeShape, chain_of, draw_child
from harness.decoding.verify import Offer, verify
from harness.decoding.warp import Warp
from verifiers import FALSE_ALARM_RATE, arguments

SIZE = 4
NUM_DRAWS = 20_000
LOSSLESS = [verify_rounds, verify_traversal]
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

    The draft is another chain; `by_level` it predicts the tokens of a level alike after all nodes, as
    heads do that draft a block at once.
    """

    def __init__(
        self,
        seed: int,
        *,
        deterministic: bool,
        by_level: bool = False,
        warp: Warp | None = None,
    ) -> None:
        parents = random_tree(seed)
        self._levels = TreeShape([parents]).depths_on(torch.device("cpu"))[0].clamp(max=SIZE)
        self._by_level = by_level
        self._generator = torch.Generator().manual_seed(seed)
        chain = markov_chain(seed)
        self.target = chain if warp is None else warp(chain.log())
        draft = markov_chain(seed + 100)
        draft[0, 1:3] = 0  # fewer tokens than some nodes have children
        draft = draft / draft.sum(-1, keepdim=True)
        tokens = self._tokens(parents, draft, deterministic)
        self.parents = parents
        shape = TreeShape([parents] * NUM_DRAWS).on(tokens.device)
        limits = torch.where(torch.arange(NUM_DRAWS) % 3 == 0, 1, len(parents)).unsqueeze(1)
        self.offer = TreeOffer(
            chain[tokens].log(),
            self.target[tokens],
            tokens[:, 1:],
            self._uniforms(len(parents)),
            self._uniforms(len(parents) + 1),
            shape.depths[:, 1:] <= limits,
            *shape,
            None if deterministic else self._drafted(draft, tokens),
        )

    def _uniforms(self, *shape: int) -> Tensor:
        return torch.rand(NUM_DRAWS, *shape, generator=self._generator)

    def _drafted(self, draft: Tensor, tokens: Tensor) -> Tensor:
        """The draft's distributions [B, n, V] after the text and each node."""
        given = self._levels[: tokens.shape[1]].expand_as(tokens) if self._by_level else tokens
        return draft[given]

    def _tokens(self, parents: Parents, draft: Tensor, deterministic: bool) -> Tensor:
        """The last token of the text, then the nodes."""
        tokens = torch.full((NUM_DRAWS, 1), SIZE)
        for node, parent in enumerate(parents):
            siblings = [one + 1 for one in range(node) if parents[one] == parent]
            after = self._drafted(draft, tokens)[:, parent]
            new = after.argsort(dim=1, descending=True)[:, len(siblings)]
            if not deterministic:
                new = draw_child(after, tokens[:, siblings], self._uniforms())
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


@pytest.mark.parametrize("deterministic", [False, True], ids=["drawn", "deterministic"])
@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_keeps_the_target_s_distribution(rule: TreeRule, seed: int, deterministic: bool) -> None:
    """False-alarm rate 1e-9."""
    assert Trees(seed, deterministic=deterministic).p_value(rule) > FALSE_ALARM_RATE


@pytest.mark.parametrize("rule", LOSSLESS)
def test_it_keeps_the_target_s_distribution_where_levels_are_drawn_alike(rule: TreeRule) -> None:
    """False-alarm rate 1e-9. A verification with other probabilities than the drawn ones is caught."""
    trees = Trees(2, deterministic=False, by_level=True)
    assert trees.p_value(rule) > FALSE_ALARM_RATE
    drafted = trees.offer.draft_probabilities
    assert drafted is not None
    wrong = dataclasses.replace(trees.offer, draft_probabilities=drafted.roll(1, dims=1))
    trees.offer = wrong
    assert trees.p_value(rule) < FALSE_ALARM_RATE


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_draft_that_is_not_renormalised_after_a_rejection_is_caught(
    rule: TreeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = Trees(2, deterministic=False)
    reject = tree_rules._Remaining.reject

    def without_draft(remaining: tree_rules._Remaining, *args: Tensor, **more: Any) -> Tensor:
        assert remaining.draft is not None
        before = remaining.draft.clone(), remaining.draft_mass.clone()
        mass = reject(remaining, *args, **more)
        remaining.draft, remaining.draft_mass = before
        return mass

    monkeypatch.setattr(tree_rules._Remaining, "reject", without_draft)
    assert trees.p_value(rule) < FALSE_ALARM_RATE


@pytest.mark.parametrize("rule", LOSSLESS)
def test_duplicate_siblings_count_once(rule: TreeRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that leaves a rejected token in the target accepts it twice as often, and is caught."""
    trees = Trees(2, deterministic=True)
    tokens = trees.offer.draft_tokens.clone()
    siblings = [node for node, parent in enumerate(trees.parents) if parent == 0]
    tokens[:, siblings] = tokens[:, siblings[:1]]
    drawn = torch.cat([torch.full((NUM_DRAWS, 1), SIZE), tokens], dim=1)
    trees.offer = dataclasses.replace(
        trees.offer, draft_tokens=tokens, target_probabilities=trees.target[drawn]
    )
    assert len(siblings) > 1
    assert trees.p_value(rule) > FALSE_ALARM_RATE

    def nothing_taken_out(remaining: tree_rules._Remaining, *args: Tensor, **more: Any) -> Tensor:
        return torch.ones(NUM_DRAWS)

    monkeypatch.setattr(tree_rules._Remaining, "reject", nothing_taken_out)
    assert trees.p_value(rule) < FALSE_ALARM_RATE


def test_eagle_s_own_sampling_is_lossless_at_temperature_1_alone() -> None:
    """It draws the token after an accepted leaf at temperature 1."""
    assert Trees(3, deterministic=True).p_value(verify_eagle) > FALSE_ALARM_RATE
    warm = Trees(3, deterministic=True, warp=WARM)
    assert warm.p_value(verify_rounds) > FALSE_ALARM_RATE
    assert warm.p_value(verify_eagle) < FALSE_ALARM_RATE


def chain_offers(num_rows: int, deterministic: bool) -> tuple[Offer, TreeOffer]:
    """The same chain of tokens as both kinds of offer."""
    target, tokens, draft, accept, following = arguments(num_rows, 4)
    lengths = torch.arange(num_rows) % 5
    drafted = None if deterministic else draft
    offer = Offer(target, tokens, drafted, accept, following, lengths=lengths)
    shape = TreeShape([chain_of(4)] * num_rows).on(tokens.device)
    if drafted is not None:
        drafted = torch.cat([drafted, torch.zeros_like(drafted[:, :1])], dim=1)
    offered = torch.arange(4) < lengths.unsqueeze(1)
    tree = TreeOffer(
        target.log(),
        target,
        tokens,
        accept,
        following,
        offered,
        *shape,
        draft_probabilities=drafted,
    )
    return offer, tree


@pytest.mark.parametrize("deterministic", [False, True], ids=["drawn", "deterministic"])
def test_on_a_tree_of_width_1_the_rules_are_those_of_chains(deterministic: bool) -> None:
    offer, tree = chain_offers(5_000, deterministic)
    plain, of_tree = verify(offer), verify_rounds(tree)
    assert torch.equal(plain.num_accepted, of_tree.num_accepted)
    assert torch.equal(plain.next_token, of_tree.next_token)
    block, traversed = verify_block(offer), verify_traversal(tree)
    assert torch.equal(block.num_accepted, traversed.num_accepted)
    # Weights on another scale may round to the other side of a uniform.
    assert (block.next_token != traversed.next_token).sum() <= 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_traversal_keeps_at_least_as_much_as_rounds(seed: int) -> None:
    offer = Trees(seed, deterministic=False).offer
    means = [rule(offer).num_accepted.double().mean() for rule in LOSSLESS[::-1]]
    assert means[0] > means[1] - 0.005


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
    offer = TreeOffer(target.log(), target, tokens[:, 1:], numbers[:, 1:], numbers, offered, *shape)
    for rule in (*LOSSLESS, verify_eagle):
        verdict = rule(offer)
        assert (int(verdict.last_node), int(verdict.num_accepted)) == (6, 3)
        assert int(verdict.next_token) == 3
