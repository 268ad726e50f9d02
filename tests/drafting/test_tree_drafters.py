"""Trees grow to the likeliest nodes; heads and draft models predict each node as they would after its path alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import generated, random_model
from block_reference import block_expected
from chains import GREEDY, chain, request, texts
from eagle_reference import eagle_expected
from fakes import TablePredictor, planned_trees
from harness.decoding.loops import speculative
from harness.decoding.protocols import Step, TreeDrafter
from harness.decoding.randomness import uniforms
from harness.decoding.tree_rules import verify_rounds, verify_traversal
from harness.decoding.tree_speculation import speculative_trees
from harness.decoding.trees import Parents, TreeProposal, TreeShape, chain_of
from harness.decoding.warp import Warp
from harness.drafting.heads.blocks import Head
from harness.drafting.kinds.dflash2 import SelectorHead
from harness.drafting.kinds.eagle3 import EagleHead
from harness.drafting.kinds.medusa import MedusaHead
from harness.drafting.trees.growth import DynamicGrowth, Growth, Predictor, StaticGrowth
from harness.drafting.trees.head_predictors import MarginalPredictor
from harness.drafting.trees.model_trees import ModelTreeDrafter, _ReadTree
from harness.drafting.trees.plan import TreePlan, best_shape
from harness.drafting.trees.score_temperatures import ScoreTemperatures
from harness.runners.eager import EagerRunner
from harness.runners.static import StaticRunner
from head_references import PROMPTS, Expected
from medusa_reference import medusa_expected
from selector_reference import path_expected
from small_heads import (
    block_head,
    eagle_head,
    layer_config,
    medusa_head,
    selector_head,
    target_model,
)

DEPTH, BUDGET = 4, 9
RATES = (0.6, 0.3, 0.2)


def paths_of(tokens: Sequence[int], parents: Parents) -> list[tuple[int, ...]]:
    """The tokens up to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def grown(growth: Growth, predictor: Predictor, uniforms: Tensor) -> TreeProposal:
    return growth.trees(growth.grow(predictor, uniforms, torch.ones(len(uniforms))))


def planned(
    plan: TreePlan, predictor: Predictor, depth: int, warp: Warp, rows: int
) -> TreeProposal:
    """Trees of a plan, for rows without a past."""
    scores = ScoreTemperatures(plan.score_temperature)
    scores.add(rows)
    return planned_trees(plan, predictor, depth, warp, torch.rand(rows, plan.budget), scores)


def random_chain(size: int) -> Tensor:
    transitions = chain(3)[:size, :size]
    return transitions / transitions.sum(-1, keepdim=True)


@pytest.mark.parametrize("marginal", [False, True], ids=["by token", "by level"])
def test_a_dynamic_tree_has_the_likeliest_paths(marginal: bool) -> None:
    size, depth, budget = 5, 3, 12
    table = random_chain(size)
    predictor: Predictor = TablePredictor(table, [0, 0])
    if marginal:
        predictor = MarginalPredictor(table[:depth].log().expand(2, -1, -1))
    proposal = grown(DynamicGrowth(depth, budget), predictor, torch.zeros(2, budget))
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


def test_a_low_score_temperature_makes_a_deeper_tree() -> None:
    """At a low one the likeliest path counts nearly as much as its first node."""
    depths = []
    for score_temperature in (0.05, 1.0):
        plan = TreePlan("dynamic", 6, score_temperature=score_temperature)
        predictor = TablePredictor(random_chain(5), [0])
        proposal = planned(plan, predictor, 6, GREEDY, 1)
        depths.append(int(proposal.shape.depths.max()))
    assert depths[0] > depths[1]


def accepted_tokens(parents: Parents, rates: Sequence[float]) -> float:
    chances = [1.0]
    for node, parent in enumerate(parents):
        chances.append(chances[parent] * rates[parents[:node].count(parent)])
    return sum(chances) - 1


@pytest.mark.parametrize(("depth", "budget"), [(1, 2), (3, 6), (4, 7)])
def test_the_best_shape_is_that_of_sequoia_s_dynamic_programme(depth: int, budget: int) -> None:
    """The programme counts the root as a node with probability 1."""

    def most(num_nodes: int, levels: int) -> float:
        """The most expected accepted tokens of a subtree with this many nodes below its own."""
        return below(num_nodes, levels, 0) if levels else 0.0

    def below(num_nodes: int, levels: int, rank: int) -> float:
        if num_nodes == 0 or rank == len(RATES):
            return 0.0
        values = [0.0]
        for own in range(1, num_nodes + 1):
            child = RATES[rank] * (1 + most(own - 1, levels - 1))
            values.append(child + below(num_nodes - own, levels, rank + 1))
        return max(values)

    shape = best_shape(RATES, depth, budget)
    assert accepted_tokens(shape, RATES) == pytest.approx(most(budget, depth))
    assert best_shape((0.9,), depth, budget) == chain_of(min(depth, budget))


def test_a_static_tree_s_siblings_differ_and_follow_their_parents() -> None:
    transitions = chain(3)
    shape = best_shape(RATES, 3, 10)
    text = [0] * 50
    drawn, likeliest = (
        grown(
            StaticGrowth(shape, warp, torch.device("cpu")),
            TablePredictor(transitions, text),
            torch.rand(50, 10),
        )
        for warp in (Warp(1.0), None)
    )
    assert drawn.probabilities is not None
    assert likeliest.probabilities is None
    for row in range(50):
        for proposal in (drawn, likeliest):
            paths = paths_of(proposal.tokens[row].tolist(), shape)
            assert len(set(paths)) == len(paths)
        for node, parent in enumerate(shape):
            before = 0 if parent == 0 else int(drawn.tokens[row, parent - 1])
            assert torch.allclose(drawn.probabilities[row, parent], transitions[before], atol=1e-6)
            rank = shape[:node].count(parent)
            before = 0 if parent == 0 else int(likeliest.tokens[row, parent - 1])
            order = transitions[before].argsort(descending=True)
            assert likeliest.tokens[row, node] == order[rank]


class Checked:
    """A drafter of drawn trees, whose distributions are compared with a plain computation."""

    def __init__(self, drafter: TreeDrafter, target: torch.nn.Module, expected: object) -> None:
        self.layers = drafter.layers
        self.drafter, self.target, self.expected = drafter, target, expected
        self.rows: list[list[int]] = []
        self.error = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.drafter, name)

    def start(self, prompts: list[list[int]], first_tokens: list[int], step: Step) -> None:
        self.rows = [[*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        self.drafter.start(prompts, first_tokens, step)

    def propose_tree(self, depth: int, limits: Sequence[int], numbers: Tensor) -> TreeProposal:
        proposal = self.drafter.propose_tree(depth, limits, numbers)
        assert proposal.probabilities is not None
        self.path = proposal.tokens
        for index, row in enumerate(self.rows):
            decided = torch.tensor(row)
            states = self.target(
                input_ids=decided[None, :-1], output_hidden_states=True
            ).hidden_states
            features = torch.stack([states[layer][0] for layer in self.layers], dim=1)
            parents = proposal.shape.parents[index]
            paths = paths_of(proposal.tokens[index].tolist(), parents)
            for path, parent in zip(paths, parents, strict=True):
                expected = self.expected(decided, torch.tensor(path), features)[-1]
                found = proposal.probabilities[index, parent].log()
                known = expected > -torch.inf
                self.error = max(self.error, float((found - expected)[known].abs().max()))
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


def tree_request(warp: Warp, length: int = 20) -> object:
    numbers = uniforms(0, range(len(PROMPTS)), (length + 1) * (BUDGET + 1))
    what = request(PROMPTS, warp, length)
    return type(what)(PROMPTS, numbers, warp, length)


DSPARK = {"from_anchor": True, "markov_rank": 6}
# Heads of every kind, some with a vocabulary of their own.
HEADS: dict[str, Callable[[], Head]] = {
    "EAGLE-3": lambda: eagle_head(layer_config("llama")),
    "EAGLE-3, reduced vocabulary": lambda: eagle_head(layer_config("llama"), reduced=True),
    "P-EAGLE": lambda: eagle_head(layer_config("llama", 2), mask_token_id=96, reduced=True),
    "Medusa": lambda: medusa_head(True),
    "DFlash": lambda: block_head(window=True),
    "JetSpec": lambda: block_head(causal=True),
    "DFlash 2": selector_head,
    "DSpark, reduced vocabulary": lambda: block_head(reduced=True, **DSPARK),
}


def expected_of(head: Head, target: PreTrainedModel) -> Expected:
    if isinstance(head, EagleHead):
        return eagle_expected(head, head.embed_tokens, head.lm_head)
    if isinstance(head, MedusaHead):
        return medusa_expected(head, target)
    if isinstance(head, SelectorHead):
        return path_expected(head, target)
    return block_expected(head, target)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_predicts_each_node_as_after_its_path_alone(name: str) -> None:
    """So the verification reads the distributions that the nodes were drawn from."""
    target, head = target_model(), HEADS[name]()
    drafter = head.drafter(target, Warp(), TreePlan("static", BUDGET, RATES))
    checked = Checked(drafter, target, expected_of(head, target))
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    records = list(
        speculative_trees(runner, checked, tree_request(Warp()), DEPTH, BUDGET, verify_rounds)
    )
    assert max(count for record in records for count in record.num_accepted) >= 1
    assert checked.error < 1e-4


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("make", [EagerRunner, StaticRunner])
@pytest.mark.parametrize("name", ["EAGLE-3", "P-EAGLE", "Medusa", "DSpark, reduced vocabulary"])
def test_greedy_texts_with_a_head_are_those_of_generate(kind: str, make: type, name: str) -> None:
    target, head = target_model(), HEADS[name]()
    drafter = head.drafter(target, GREEDY, TreePlan(kind, BUDGET, RATES))
    runner = make(target, hidden_layers=drafter.layers)
    records = speculative_trees(
        runner, drafter, tree_request(GREEDY), DEPTH, BUDGET, verify_traversal
    )
    assert texts(records, 3) == [generated(target, prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize("name", HEADS)
def test_a_static_tree_of_width_1_drafts_what_a_chain_drafts(name: str) -> None:
    target, head = target_model(), HEADS[name]()
    expected = [
        record.proposed
        for record in speculative(
            StaticRunner(target, hidden_layers=head.config.layers),
            head.drafter(target, GREEDY),
            request(PROMPTS, GREEDY, 20),
            DEPTH,
        )
    ]
    drafter = head.drafter(target, GREEDY, TreePlan("static", DEPTH, (0.9,)))
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    what = tree_request(GREEDY)
    found = speculative_trees(runner, drafter, what, DEPTH, DEPTH, verify_rounds)
    assert [record.proposed for record in found] == expected


def test_a_head_learns_the_temperature_of_its_scores_from_verdicts() -> None:
    target, head = target_model(), HEADS["EAGLE-3"]()
    drafter = head.drafter(target, GREEDY, TreePlan("dynamic", BUDGET, score_temperature="auto"))
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    what = tree_request(GREEDY)
    list(speculative_trees(runner, drafter, what, DEPTH, BUDGET, verify_traversal))
    at_first = ScoreTemperatures("auto")
    at_first.add(1)
    (first,) = at_first.of_rows(GREEDY, drafter.device).tolist()
    # Weights at random are not as sure as they say.
    assert min(drafter._scores.of_rows(GREEDY, drafter.device).tolist()) > first


class Sure(StaticRunner):
    """Its likeliest tokens have nearly all of the probability."""

    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        step = super().extend(tokens, tree)
        return step if tree is None else Step(50 * step.logits)


class Counting(StaticRunner):
    """Notes how many tokens of a tree each pass reads."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        self.widths: list[int] = []
        return super().start(prompts)

    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        if tree is not None:
            self.widths.append(tokens.shape[1])
        return super().extend(tokens, tree)


def test_a_draft_model_reads_each_node_once() -> None:
    """A level is one pass over its own nodes, and one decided token is read again."""
    runner = Counting(random_model("llama"))
    drafter = ModelTreeDrafter(runner, GREEDY, TreePlan("dynamic", BUDGET))
    what = tree_request(GREEDY)
    target = StaticRunner(random_model("llama", seed=1))
    records = list(speculative_trees(target, drafter, what, DEPTH, BUDGET, verify_rounds))
    assert len(records) > 2
    levels = [BUDGET] * (DEPTH - 1)
    first, second = runner.widths[:DEPTH], runner.widths[DEPTH : 2 * DEPTH]
    assert first == [1, *levels]
    assert second == [2, *levels]


@torch.inference_mode()
def test_a_draft_model_of_trees_goes_on_after_a_chain() -> None:
    """An exact reference asks a drafter of trees for a chain."""
    model, numbers = random_model("llama"), torch.full((1, 2), 0.5)
    drafter, fresh = (
        ModelTreeDrafter(StaticRunner(model), GREEDY, TreePlan("static", 2, (0.9,)))
        for _ in range(2)
    )
    nothing = Step(torch.empty(0))
    drafter.start([[5, 9]], [3], nothing)
    chained = drafter.propose(2, numbers).tokens[0].tolist()
    drafter.observe([2], [7], nothing)
    fresh.start([[5, 9, 3, *chained]], [7], nothing)
    found, expected = (each.propose_tree(2, [2], numbers) for each in (drafter, fresh))
    assert found.tokens.equal(expected.tokens)


def test_the_first_of_equal_siblings_is_kept() -> None:
    """Behind two decided tokens the root has the children 5 and 5 (2 and 3), and each of these a child."""
    tree = _ReadTree(2)
    tree.append([5, 5], [0, 0])
    tree.append([6, 6], [0, 1])
    assert tree.path([5, 6, 7]) == [0, 1, 2, 4]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_draft_that_is_the_target_is_right_on_every_level(kind: str, name: str) -> None:
    """So its cache follows the accepted paths, and every node has its position and its ancestors."""
    target = random_model(name)
    drafter = ModelTreeDrafter(Sure(target), GREEDY, TreePlan(kind, BUDGET, RATES))
    records = list(
        speculative_trees(
            StaticRunner(target), drafter, tree_request(GREEDY, 21), DEPTH, BUDGET, verify_rounds
        )
    )
    assert texts(records, 3) == [generated(target, prompt, 21) for prompt in PROMPTS]
    assert [record.num_accepted for record in records[1:]] == [[DEPTH] * 3] * 4
