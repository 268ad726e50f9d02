"""Trees grow to the likeliest nodes; heads predict each node as they would after its path alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import generated
from block_reference import block_expected
from chains import GREEDY, chain, request, texts
from eagle_reference import eagle_expected
from fakes import TablePredictor
from harness.local.decoding.protocols import Step
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.tree_rules import verify_rounds
from harness.local.decoding.tree_speculation import speculative_trees
from harness.local.decoding.trees import Parents, TreeProposal
from harness.local.decoding.warp import Warp
from harness.local.drafting.heads.blocks import Head
from harness.local.drafting.heads.drafter import HeadDrafter
from harness.local.drafting.heads.unread import Unread
from harness.local.drafting.kinds.dflash2 import SelectorHead
from harness.local.drafting.kinds.eagle3 import EagleHead
from harness.local.drafting.kinds.medusa import MedusaHead
from harness.local.drafting.trees.growth import Grown, Growth, Predictor, trees_of
from harness.local.drafting.trees.head_predictors import MarginalPredictor
from harness.local.runners.eager import EagerRunner
from harness.local.runners.static import StaticRunner
from head_references import PROMPTS, Expected
from medusa_reference import medusa_expected
from selector_reference import path_expected
from small_heads import TREE_HEADS, target_model

DEPTH, BUDGET = 3, 6


def paths_of(tokens: Sequence[int], parents: Parents) -> list[tuple[int, ...]]:
    """The tokens up to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def random_chain(size: int) -> Tensor:
    transitions = chain(3)[:size, :size]
    return transitions / transitions.sum(-1, keepdim=True)


@pytest.mark.parametrize("marginal", [False, True], ids=["by token", "by level"])
def test_a_tree_has_the_likeliest_paths(marginal: bool) -> None:
    size, depth, budget = 5, 3, 12
    table = random_chain(size)
    predictor: Predictor = TablePredictor(table, [0, 0])
    if marginal:
        predictor = MarginalPredictor(table[:depth].log().expand(2, -1, -1))
    proposal = trees_of(Growth(depth, budget).grow(predictor))
    likelihoods = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(size), repeat=length):
            rows = range(length) if marginal else (0, *path)
            likelihoods[path] = sum(
                float(table[row, token].log()) for row, token in zip(rows, path, strict=False)
            )
    # A level expands its five likeliest nodes, which hold all that can be among the first twelve.
    likeliest = sorted(likelihoods, key=lambda path: -likelihoods[path])[:budget]
    for row in range(2):
        found = paths_of(proposal.tokens[row].tolist(), proposal.shape.parents[row])
        assert sorted(found) == sorted(likeliest)


class Checked:
    """A drafter of trees, whose nodes' scores are compared with a plain computation."""

    def __init__(self, drafter: HeadDrafter, target: torch.nn.Module, expected: object) -> None:
        self.layers = drafter.layers
        self.drafter, self.target, self.expected = drafter, target, expected
        self.rows: list[list[int]] = []
        self.grown: list[Grown] = []
        self.error = 0.0
        grow = drafter.grow

        def noting(depth: int, unread: Unread) -> Grown:
            self.grown.append(grow(depth, unread))
            return self.grown[-1]

        drafter.grow = noting  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> object:
        return getattr(self.drafter, name)

    def start(self, prompts: list[list[int]], first_tokens: list[int], step: Step) -> None:
        self.rows = [[*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        self.drafter.start(prompts, first_tokens, step)

    def propose_tree(self, depth: int) -> TreeProposal:
        proposal = self.drafter.propose_tree(depth)
        self.path = proposal.tokens
        scores = self.grown[-1].scores
        for index, row in enumerate(self.rows):
            decided = torch.tensor(row)
            states = self.target(
                input_ids=decided[None, :-1], output_hidden_states=True
            ).hidden_states
            features = torch.stack([states[layer][0] for layer in self.layers], dim=1)
            parents = proposal.shape.parents[index]
            paths = paths_of(proposal.tokens[index].tolist(), parents)
            for node, path in enumerate(paths):
                above = self.expected(decided, torch.tensor(path), features)
                expected = sum(
                    float(likelihoods[token])
                    for likelihoods, token in zip(above, path, strict=True)
                )
                self.error = max(self.error, abs(float(scores[index, node]) - expected))
        return proposal

    def follow(self, path: Tensor) -> None:
        self.path = self.path.gather(1, path - 1)
        self.drafter.follow(path)

    def observe(self, num_accepted: list[int], next_tokens: list[int], step: Step) -> None:
        for row, path, count, following in zip(
            self.rows, self.path.tolist(), num_accepted, next_tokens, strict=True
        ):
            row += [*path[:count], following]
        self.drafter.observe(num_accepted, next_tokens, step)

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.path = self.path[rows]
        self.drafter.select(rows)


def tree_request(warp: Warp, length: int = 12) -> object:
    numbers = uniforms(0, range(len(PROMPTS)), (length + 1) * (BUDGET + 1))
    what = request(PROMPTS, warp, length)
    return type(what)(PROMPTS, numbers, warp, length)


def expected_of(head: Head, target: PreTrainedModel) -> Expected:
    if isinstance(head, EagleHead):
        return eagle_expected(head, head.embed_tokens, head.lm_head)
    if isinstance(head, MedusaHead):
        return medusa_expected(head, target)
    if isinstance(head, SelectorHead):
        return path_expected(head, target)
    return block_expected(head, target)


@pytest.mark.parametrize("name", TREE_HEADS)
def test_a_head_predicts_each_node_as_after_its_path_alone(name: str) -> None:
    target, head = target_model(), TREE_HEADS[name]()
    drafter = head.drafter(target, Warp(), BUDGET)
    checked = Checked(drafter, target, expected_of(head, target))
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    records = list(
        speculative_trees(runner, checked, tree_request(Warp()), DEPTH, BUDGET, verify_rounds)
    )
    assert max(count for record in records for count in record.num_accepted) >= 1
    assert checked.error < 1e-3


@pytest.mark.parametrize("make", [EagerRunner, StaticRunner])
@pytest.mark.parametrize("name", ["eagle3", "peagle", "medusa", "dspark"])
def test_greedy_texts_with_a_head_are_those_of_generate(make: type, name: str) -> None:
    target, head = target_model(), TREE_HEADS[name]()
    drafter = head.drafter(target, GREEDY, BUDGET)
    runner = make(target, hidden_layers=drafter.layers)
    records = speculative_trees(runner, drafter, tree_request(GREEDY), DEPTH, BUDGET, verify_rounds)
    assert texts(records, 3) == [generated(target, prompt, 12) for prompt in PROMPTS]
