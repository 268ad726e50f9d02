"""The loop over trees: greedy texts, distributions, and a tree of width 1 in place of a chain."""

from __future__ import annotations

import dataclasses

import torch

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
from harness.engines.arrivals import Origin
from harness.local.decoding.batch import Request
from harness.local.decoding.loops import autoregressive, speculative
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.tree_rules import verify_rounds
from harness.local.decoding.tree_speculation import speculative_trees
from harness.local.decoding.trees import chain_of
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from verifiers import FALSE_ALARM_RATE

SHAPE = (0, 0, 1, 1, 2, 3)


def with_room(what: Request, num_nodes: int) -> Request:
    """A longer stream of random numbers: every iteration takes new ones."""
    count = (what.max_new_tokens + 1) * (num_nodes + 1)
    return dataclasses.replace(what, uniforms=uniforms(0, range(len(what.prompts)), count))


def test_greedy_texts_are_the_regular_ones() -> None:
    """Ragged prompts, rows that end at different times, and fewer levels towards the end."""
    target, draft = chain(1), chain(2, 1.0) + 0.5 * chain(1)
    what = with_room(request(RAGGED, GREEDY, 30), 6)
    expected = texts(autoregressive(MarkovRunner(target), what), 3)
    drafter = ChainTreeDrafter(draft, SHAPE)
    runner = MarkovRunner(target)
    records = list(speculative_trees(runner, drafter, what, 3, 6, verify_rounds))
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
    drafter = ChainTreeDrafter(draft, SHAPE)
    chosen = Scripted([0, 3, 1, 0, 2])
    records = list(speculative_trees(MarkovRunner(target), drafter, what, chosen, 6, verify_rounds))
    assert texts(records, 3) == expected
    assert len(chosen.seen) == chosen.turn
    assert {max(limits) for limits, _ in chosen.seen} == {0, 1, 2, 3}
    for limits, accepted in chosen.seen:
        assert all(count <= limit for count, limit in zip(accepted, limits, strict=True))


def test_kept_logits_decided_the_tokens_beside_them() -> None:
    """In the order of the path that was kept, not of the tree's nodes."""
    target, draft = chain(1), chain(2, 1.0) + 0.5 * chain(1)
    what = dataclasses.replace(with_room(request(RAGGED, GREEDY, 30), 6), keeps_logits=True)
    runner = MarkovRunner(target)
    last = [prompt[-1] for prompt in RAGGED]
    longest = 0
    for record in speculative_trees(
        runner, ChainTreeDrafter(draft, SHAPE), what, 3, 6, verify_rounds
    ):
        for row, tokens in zip(record.rows, record.tokens, strict=True):
            before = [last[row], *tokens[:-1]]
            torch.testing.assert_close(record.logits[row][: len(tokens)], target.log()[before])
            last[row] = tokens[-1]
            longest = max(longest, len(tokens))
    assert longest > 2


def test_the_loop_keeps_the_target_s_distribution() -> None:
    """Chi-square over the first token and the four after it, false-alarm rate 1e-9."""
    num_rows = 6_000
    target, draft = small_chain(5, 0.8, 3), small_chain(6, 1.2, 3).float()
    what = with_room(request([[0]] * num_rows, Warp(1.0), 5), 6)
    drafter = ChainTreeDrafter(draft, SHAPE)
    runner = MarkovRunner(target.float())
    records = speculative_trees(runner, drafter, what, 3, 6, verify_rounds)
    assert p_value_of_texts(texts(records, num_rows), target, 0) > FALSE_ALARM_RATE


def test_a_tree_of_width_1_is_a_chain() -> None:
    """The same records, of the same random numbers."""
    target, draft = chain(1), chain(2, 1.0)
    what = with_room(request(RAGGED, GREEDY, 12), 4)
    drafter = ModelDrafter(MarkovRunner(draft), GREEDY)
    expected = speculative(MarkovRunner(target), drafter, what, 4, redraw=True)
    trees = ChainTreeDrafter(draft, chain_of(4))
    found = speculative_trees(MarkovRunner(target), trees, what, 4, 4, verify_rounds)
    assert list(map(fields, expected)) == list(map(fields, found))
