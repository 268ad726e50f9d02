"""The loop over trees: greedy texts, distributions, and a tree of width 1 in place of a chain."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from chains import (
    GREEDY,
    RAGGED,
    chain,
    fields,
    p_value_of_texts,
    request,
    small_chain,
    texts,
)
from fakes import ChainTreeDrafter, MarkovRunner, Scripted
from harness.decoding.batch import Request
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.protocols import Origin, Step
from harness.decoding.randomness import uniforms
from harness.decoding.rules import verify_block
from harness.decoding.tree_rules import TreeRule, verify_eagle, verify_rounds, verify_traversal
from harness.decoding.tree_speculation import speculative_trees
from harness.decoding.trees import TreeShape, chain_of
from harness.decoding.verify import verify
from harness.decoding.warp import Warp
from harness.drafting.model import ModelDrafter
from harness.results.acceptance import rates_by_rank
from verifiers import FALSE_ALARM_RATE

SHAPE = (0, 0, 1, 1, 2, 3)


def with_room(what: Request, num_nodes: int) -> Request:
    """A longer stream of random numbers: every iteration takes new ones."""
    count = (what.max_new_tokens + 1) * (num_nodes + 1)
    return dataclasses.replace(what, uniforms=uniforms(0, range(len(what.prompts)), count))


@pytest.mark.parametrize("rule", [verify_rounds, verify_traversal, verify_eagle])
def test_greedy_texts_are_the_regular_ones(rule: TreeRule) -> None:
    """Ragged prompts, rows that end at different times, and fewer levels towards the end."""
    target, draft = chain(1), chain(2, 1.0) + 0.5 * chain(1)
    what = with_room(request(RAGGED, GREEDY, 30), 6)
    expected = texts(autoregressive(MarkovRunner(target), what), 3)
    drafter = ChainTreeDrafter(draft, SHAPE, deterministic=True)
    runner = MarkovRunner(target)
    records = list(speculative_trees(runner, drafter, what, 3, 6, rule))
    assert texts(records, 3) == expected
    origins = {origin for record in records for row in record.origins for origin in row}
    assert {Origin.DRAFT, Origin.RECOVERED, Origin.BONUS} <= origins
    for record in records[1:]:
        for tokens, proposed, accepted in zip(
            record.tokens, record.proposed, record.num_accepted, strict=True
        ):
            assert tokens[:accepted] == proposed[:accepted]


def test_levels_may_be_chosen_before_every_iteration() -> None:
    """None at all is an iteration of regular decoding."""
    target, draft = chain(1), chain(2, 1.0) + 0.5 * chain(1)
    what = with_room(request(RAGGED, GREEDY, 30), 6)
    expected = texts(autoregressive(MarkovRunner(target), what), 3)
    drafter = ChainTreeDrafter(draft, SHAPE, deterministic=True)
    chosen = Scripted([0, 3, 1, 0, 2])
    records = list(speculative_trees(MarkovRunner(target), drafter, what, chosen, 6, verify_rounds))
    assert texts(records, 3) == expected
    assert len(chosen.seen) == chosen.turn
    assert {max(limits) for limits, _ in chosen.seen} == {0, 1, 2, 3}
    for limits, accepted in chosen.seen:
        assert all(count <= limit for count, limit in zip(accepted, limits, strict=True))


def test_branches_say_which_child_of_each_node_was_accepted() -> None:
    shape = TreeShape([SHAPE, SHAPE], [2, 3])
    assert shape.branches(0, [2, 5]) == [(2, 1), (1, 0)]
    assert shape.branches(0, [1]) == [(2, 0), (2, None)]
    assert shape.branches(1, [1, 3]) == [(2, 0), (2, 0), (1, None)]
    assert shape.branches(1, []) == [(2, None)]
    assert rates_by_rank([(2, 1), (1, 0), (2, None)]) == [1 / 3, 1 / 2]


class KeepsSibling(MarkovRunner):
    """Keeps the first tokens of a tree instead of the path."""

    def keep_path(self, paths: Tensor, counts: list[int]) -> None:
        super().keep_path(torch.arange(paths.shape[1]).expand_as(paths), counts)


class WrongPositions(MarkovRunner):
    """Numbers the nodes of a tree as if they were a text."""

    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        if tree is not None:
            tree = TreeShape([chain_of(tree.num_nodes)] * len(tokens))
        return super().extend(tokens, tree)


@pytest.mark.parametrize("make", [KeepsSibling, WrongPositions])
def test_faults_of_runners_reach_the_drafter(make: type[MarkovRunner]) -> None:
    target = chain(1)
    what = with_room(request(RAGGED, GREEDY, 11), 6)
    drafter = ChainTreeDrafter(target.flip(1) + target, SHAPE, deterministic=True)
    runner = make(target)
    try:
        list(speculative_trees(runner, drafter, what, 3, 6, verify_rounds))
    except AssertionError:
        return
    decided = [row[:-1] for row in drafter.rows]
    assert [row[: len(known)] for row, known in zip(runner.rows, decided, strict=True)] != decided


@pytest.mark.parametrize("rule", [verify_rounds, verify_traversal])
@pytest.mark.parametrize("deterministic", [False, True], ids=["drawn", "deterministic"])
def test_the_loop_keeps_the_target_s_distribution(rule: TreeRule, deterministic: bool) -> None:
    """Chi-square over the first token and the four after it, false-alarm rate 1e-9."""
    num_rows = 15_000
    target, draft = small_chain(5, 0.8, 3), small_chain(6, 1.2, 3).float()
    what = with_room(request([[0]] * num_rows, Warp(1.0), 5), 6)
    drafter = ChainTreeDrafter(draft, SHAPE, deterministic=deterministic)
    records = speculative_trees(MarkovRunner(target.float()), drafter, what, 3, 6, rule)
    assert p_value_of_texts(texts(records, num_rows), target, 0) > FALSE_ALARM_RATE


@pytest.mark.parametrize(
    ("rule", "of_chains"), [(verify_rounds, verify), (verify_traversal, verify_block)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_of_width_1_is_a_chain(
    rule: TreeRule, of_chains: object, temperature: float
) -> None:
    """The same records, of the same random numbers."""
    warp = Warp(temperature)
    target, draft = chain(1), chain(2, 1.0)
    what = with_room(request(RAGGED, warp, 12), 4)
    expected = speculative(
        MarkovRunner(target), ModelDrafter(MarkovRunner(draft), warp), what, 4, 1.0, of_chains, True
    )
    drafter = ChainTreeDrafter(draft, chain_of(4), deterministic=temperature == 0)
    found = speculative_trees(MarkovRunner(target), drafter, what, 4, 4, rule)
    assert list(map(fields, expected)) == list(map(fields, found))
