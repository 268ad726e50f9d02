"""Prepared trees of heads of every kind: what is decided is what the eager head's trees decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from chains import GREEDY
from fakes import Scripted
from harness.local.decoding.adaptive import DraftLength
from harness.local.decoding.batch import Request
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.tree_rules import verify_rounds
from harness.local.decoding.tree_speculation import speculative_trees
from harness.local.decoding.warp import Warp
from harness.local.drafting.heads.drafter import HeadDrafter
from harness.local.drafting.trees.prepared_trees import PreparedTrees
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.static import StaticRunner
from head_references import PROMPTS
from small_heads import TREE_HEADS, target_model
from traced import run_as_traced

WARM = Warp(0.8)
DEPTH, BUDGET = 3, 6
LENGTH = 12


class Eager:
    """Counts the proposals that a head made eagerly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run = HeadDrafter._run_eagerly

        def counted(drafter: HeadDrafter, *arguments: Any) -> Any:
            self.count += 1
            return run(drafter, *arguments)

        monkeypatch.setattr(HeadDrafter, "_run_eagerly", counted)


def prepare(
    head: Any,
    target: PreTrainedModel,
    warp: Warp,
    numbers: tuple[int, ...] = (DEPTH,),
    *,
    compiled: bool = False,
) -> PreparedTrees:
    drafter = head.drafter(target, warp, BUDGET)
    size = target.config.vocab_size
    prepared = PreparedTrees(drafter, target, size, compiled=compiled, captured=not compiled)
    prepared.prepare(3, 20 + LENGTH, numbers)
    return prepared


def question(prompts: list[list[int]], warp: Warp, device: str = "cpu") -> Request:
    numbers = uniforms(0, range(len(prompts)), (LENGTH + 1) * (BUDGET + 1))
    return Request(prompts, numbers.to(device), warp, LENGTH, frozenset(range(60, 63)))


def decided(
    head: Any,
    target: PreTrainedModel,
    prepared: PreparedTrees | None,
    what: Request,
    depth: int | DraftLength = DEPTH,
) -> list[Any]:
    drafter = head.drafter(target, what.warp, BUDGET)
    drafter.prepared = prepared
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    records = speculative_trees(runner, drafter, what, depth, BUDGET, verify_rounds)
    return [(record.rows, record.tokens, record.proposed) for record in records]


@pytest.mark.parametrize(
    ("kind", "warp"), [("eagle3", GREEDY), *((kind, WARM) for kind in TREE_HEADS)]
)
def test_every_kind_grows_the_trees_that_it_grows_eagerly(
    kind: str, warp: Warp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ragged batch whose rows end at different times, and for one row in the same buffers."""
    eager = Eager(monkeypatch)
    target, head = target_model(), TREE_HEADS[kind]()
    prepared = prepare(head, target, warp)
    for prompts in (PROMPTS, PROMPTS[:1]):
        what = question(prompts, warp)
        expected = decided(head, target, None, what)
        eager.count = 0
        assert decided(head, target, prepared, what) == expected
        assert eager.count == 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_depths_that_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another depth than the prepared ones is eager: a deeper tree has other nodes."""
    eager = Eager(monkeypatch)
    target, head = target_model(), TREE_HEADS[kind]()
    prepared = prepare(head, target, GREEDY, (1, 2, 4))
    what = question(PROMPTS, GREEDY)
    for depths, num_eager in [([4, 0, 0, 1, 2, 4, 1, 2], 0), ([3, 4, 3, 4], 1)]:
        expected = decided(head, target, None, what, Scripted(depths))
        eager.count = 0
        assert decided(head, target, prepared, what, Scripted(depths)) == expected
        assert (eager.count > 0) == (num_eager > 0)


def test_all_levels_of_a_tree_but_the_last_share_their_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eager = Eager(monkeypatch)
    parts = run_as_traced(monkeypatch)
    target, head = target_model(), TREE_HEADS["eagle3, reduced"]()
    depth = 4
    prepared = prepare(head, target, GREEDY, (depth,), compiled=True)
    assert 1 < len(parts) <= 3
    what = question(PROMPTS, GREEDY)
    expected = decided(head, target, None, what, depth)
    eager.count = 0
    assert decided(head, target, prepared, what, depth) == expected
    assert eager.count == 0


@pytest.mark.parametrize("kind", ["eagle3, reduced", "dflash2"])
def test_captured_trees_do_not_wait(kind: str, gpus: Any) -> None:
    """On a GPU, or a pretended one, where a capture that waits fails."""
    target, head = target_model(), TREE_HEADS[kind]()
    expected = decided(head, target, None, question(PROMPTS, GREEDY))
    target, head = target.to("cuda:0"), head.to("cuda:0")
    prepared = prepare(head, target, GREEDY)
    what = question(PROMPTS, GREEDY, "cuda:0")
    assert decided(head, target, prepared, what) == expected


@torch.inference_mode()
def test_a_call_that_grows_other_trees_is_refused() -> None:
    target, head = target_model(), TREE_HEADS["eagle3"]()
    assert head.lm_head is not None
    # A head that is sure grows deep trees.
    head.lm_head.weight.data *= 100
    prepared = prepare(head, target, GREEDY)
    inputs = prepared._example(3, DEPTH)
    tokens, scores, parents = prepared._eager(DEPTH)(*inputs)

    def require_same(*outputs: Tensor) -> None:
        prepared.require_same(lambda *inputs: outputs, DEPTH, inputs, "differ")

    require_same(tokens, scores, parents)
    with pytest.raises(UnsupportedModelError, match="other trees"):
        require_same(tokens + 1, scores, parents)
    with pytest.raises(UnsupportedModelError, match="differ"):
        require_same(tokens, scores.roll(1, dims=-1), parents)
    with pytest.raises(UnsupportedModelError, match="other trees"):
        require_same(tokens, scores, torch.zeros_like(parents))
