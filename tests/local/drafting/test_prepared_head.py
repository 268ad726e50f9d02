"""Prepared proposals of heads of every kind: the tokens are those of the eager head.

The shipped EAGLE-3 head is prepared as well, through the command line (`test_shipped_heads`).
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from chains import GREEDY, request
from fakes import Scripted
from harness.local.decoding.adaptive import DraftLength
from harness.local.decoding.batch import Request
from harness.local.decoding.loops import speculative
from harness.local.decoding.warp import Warp
from harness.local.drafting.heads.drafter import HeadDrafter
from harness.local.drafting.heads.prepared import PreparedHead
from harness.local.runners.graphs import GraphRecorder
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.static import StaticRunner
from head_references import PROMPTS
from mtp_models import mtp_target
from pretended_gpus import pretended_gpus
from small_heads import TREE_HEADS, block_head, domino_head, mtp_head, target_model

KINDS = TREE_HEADS | {
    "dspark": lambda: block_head(
        from_anchor=True, markov_rank=6, confidence=True, confidence_markov=True
    ),
    "domino": domino_head,
    "mtp": 1,
    "deep mtp": 3,
}
LENGTH = 12


def target_and_head(kind: str) -> tuple[PreTrainedModel, Any]:
    make: Any = KINDS[kind]
    if isinstance(make, int):
        target, layers = mtp_target("deepseek_v3", num_mtp_layers=make)
        return target, mtp_head(layers)
    return target_model(), make()


class Counting:
    """Counts proposals that are prepared, and those that a head drafted eagerly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_prepared = 0
        self.num_eager = 0
        prepared, eager = PreparedHead.__call__, HeadDrafter._run_eagerly

        def call(head: PreparedHead, *inputs: Any) -> Any:
            self.num_prepared += 1
            return prepared(head, *inputs)

        def draft(drafter: HeadDrafter, *inputs: Any) -> Any:
            self.num_eager += 1
            return eager(drafter, *inputs)

        monkeypatch.setattr(PreparedHead, "__call__", call)
        monkeypatch.setattr(HeadDrafter, "_run_eagerly", draft)


def prepare(
    head: Any,
    target: PreTrainedModel,
    warp: Warp,
    numbers: tuple[int, ...],
    *,
    num_rows: int = 3,
    confidence: float = 0.3,
) -> PreparedHead:
    vocabulary_size = target.config.vocab_size
    drafter = head.drafter(target, warp, confidence=confidence)
    prepared = PreparedHead(drafter, target, vocabulary_size, compiled=False, captured=True)
    prepared.prepare(num_rows, 20 + LENGTH, numbers)
    return prepared


def decided(
    head: Any,
    target: PreTrainedModel,
    prepared: PreparedHead | None,
    what: Request,
    k: int | DraftLength,
) -> list[Any]:
    assert isinstance(what.warp, Warp)
    drafter = head.drafter(target, what.warp, confidence=0.3)
    drafter.prepared = prepared
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    records = speculative(runner, drafter, what, k)
    return [(record.rows, record.tokens, record.proposed) for record in records]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_drafts_what_it_drafts_eagerly(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ragged batches whose rows end at different times, again with the same buffers, and row by row. With numbers of
    draft tokens that change, turns that draft nothing, and more features than a prepared proposal reads.
    """
    monkeypatch.setattr("harness.local.drafting.heads.drafter.MOST_UNREAD", 8)
    counting = Counting(monkeypatch)
    target, head = target_and_head(kind)
    warp = Warp(0.8)
    prepared = prepare(head, target, warp, (1, 2, 4))
    numbers = [0, 0, 4, 0, 1, 3, 4, 1]
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        what = request(prompts, warp, length=LENGTH, stop=range(60, 63))
        expected = decided(head, target, None, what, Scripted(numbers))
        counting.num_eager = 0
        assert decided(head, target, prepared, what, Scripted(numbers)) == expected
        assert counting.num_eager == 0
    assert counting.num_prepared > 3


def test_a_longer_prepared_proposal_offers_no_more_than_is_asked() -> None:
    target, head = target_and_head("dspark")
    drafter = head.drafter(target, GREEDY, confidence=1e-9)
    drafter.prepared = prepare(head, target, GREEDY, (4,), confidence=1e-9)
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    step = runner.start([[5, 9, 5, 9]])
    drafter.start([[5, 9, 5, 9]], [7], step)
    proposal = drafter.propose(2, torch.full((1, 2), 0.5))
    assert proposal.tokens.shape == (1, 2)
    assert proposal.lengths == [2]


def test_what_was_not_prepared_is_drafted_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another warp, more tokens, more rows or a longer text."""
    counting = Counting(monkeypatch)
    target, head = target_and_head("eagle3")
    prepared = prepare(head, target, GREEDY, (2,), num_rows=2)
    long = [list(range(1, 90)) * 2]
    cases = [
        (request(PROMPTS[:2], Warp(0.8), length=LENGTH), 2),
        (request(PROMPTS[:2], GREEDY, length=LENGTH), 4),
        (request(PROMPTS, GREEDY, length=LENGTH), 2),
        (request(long, GREEDY, length=LENGTH), 2),
    ]
    for what, number in cases:
        counting.num_prepared = 0
        expected = decided(head, target, None, what, number)
        assert decided(head, target, prepared, what, number) == expected
        # Where a batch has shrunk to two rows, or a text is near its end, it is prepared again.
    what = request(PROMPTS[:2], GREEDY, length=LENGTH)
    assert decided(head, target, prepared, what, 2) == decided(head, target, None, what, 2)
    assert counting.num_prepared


def test_a_text_that_outgrows_the_prepared_cache_goes_on_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first proposals fit; a later one would write behind the last slot, before the cache has grown."""
    counting = Counting(monkeypatch)
    target, head = target_and_head("eagle3")
    prepared = prepare(head, target, GREEDY, (2,))
    num_slots = prepared.cache.num_slots
    prompt = [1 + place % 90 for place in range(num_slots - 11)]
    what = request([prompt], GREEDY, length=LENGTH)
    expected = decided(head, target, None, what, 2)
    counting.num_prepared = counting.num_eager = 0
    assert decided(head, target, prepared, what, 2) == expected
    assert counting.num_prepared
    assert counting.num_eager


def test_a_closed_one_keeps_no_cache() -> None:
    target, head = target_and_head("eagle3")
    prepared = prepare(head, target, GREEDY, (2,))
    (keys, _) = prepared.cache._layers[0]
    buffer = weakref.ref(keys)
    del keys, _
    prepared.close()
    assert buffer() is None


@torch.inference_mode()
def test_a_call_that_drafts_otherwise_is_refused() -> None:
    target, head = target_and_head("eagle3")
    prepared = prepare(head, target, GREEDY, (2,))
    inputs = prepared._example(3, 2)
    right = prepared._eager(2)(*inputs)

    def wrong_logits(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens, probabilities, logits = right
        return tokens, probabilities, logits.flip(-1)

    def wrong_tokens(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens, probabilities, logits = right
        return tokens + 1, probabilities, logits

    def other_candidates(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens, probabilities, logits = right
        return tokens, probabilities, logits.masked_fill(logits < logits.median(), -torch.inf)

    prepared.require_same(lambda *inputs: right, 2, inputs, "differ")
    for wrong in (wrong_logits, wrong_tokens, other_candidates):
        with pytest.raises(UnsupportedModelError, match=r"differ|other tokens|other candidates"):
            prepared.require_same(wrong, 2, inputs, "differ")


@pytest.mark.parametrize("kind", ["eagle3, reduced", "dspark", "dflash2", "domino", "deep mtp"])
def test_captured_proposals_do_not_wait(kind: str, gpus: Any) -> None:
    """On a GPU, or a pretended one, where a capture that waits fails."""
    target, head = target_and_head(kind)
    gpu = torch.device("cuda", 0)
    warp = Warp(0.8)
    what = request(PROMPTS, warp, length=LENGTH)
    expected = decided(head, target, None, what, 3)
    target, head = target.to(gpu), head.to(gpu)
    prepared = prepare(head, target, warp, (3,))
    what = replace(what, uniforms=what.uniforms.to(gpu))
    assert decided(head, target, prepared, what, 3) == expected


@pytest.mark.parametrize(("kind", "borrows"), [("dflash", True), ("mtp", True), ("eagle3", False)])
def test_a_head_that_borrows_from_another_gpu_is_not_captured(
    kind: str, borrows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy between GPUs within a capture breaks it, and the process could not go on."""
    if torch.cuda.is_available():
        pytest.skip("for machines without")
    monkeypatch.setattr(GraphRecorder, "has_failed", False)
    with pretended_gpus():
        target, head = target_and_head(kind)
        target, head = target.to("cuda:0"), head.to("cuda:1")
        refused = pytest.raises(UnsupportedModelError, match="on another GPU")
        with refused if borrows else nullcontext():
            prepare(head, target, Warp(0.8), (3,))
    assert not GraphRecorder.has_failed
