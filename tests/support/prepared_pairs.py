"""Pairs and drafters on prepared runners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from architectures import random_pair
from chains import fields
from harness.local.decoding.decisions import Decision, Draw, Judge
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.verify import verify
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.drafting.parallel import ParallelDrafter
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.prepared_calls import RunnerShapes
from mtp_models import mtp_target
from small_heads import block_head, eagle_head, layer_config, medusa_head, mtp_head, target_model

WARP = Warp(1.0)
NUM_DRAFT_TOKENS = 3
MASK = 96

# The number of MTP layers, by kind.
LAYERS = {"mtp": 1, "deep mtp": 3}


def drafting(kind: str, device: str = "cpu") -> tuple[Runner, Drafter]:
    """A prepared target, and a drafter for it."""
    heads: dict[str, Callable[[], Any]] = {
        "eagle": lambda: eagle_head(layer_config("llama")),
        "parallel eagle": lambda: eagle_head(layer_config("llama"), mask_token_id=90),
        "block": block_head,
        "medusa": lambda: medusa_head(own_outputs=True),
    }
    if kind == "model":
        target, draft = pair("llama", device)
        return prepared(target), ModelDrafter(
            prepared(draft, num_drawn=NUM_DRAFT_TOKENS), WARP, device
        )
    if kind == "parallel":
        target, draft = pair("llama", device)
        runner = PreparedRunner(draft, compiled=False, captured=True)
        runner.prepare(RunnerShapes(3, 64, (2 * NUM_DRAFT_TOKENS,)))
        return prepared(target), ParallelDrafter(runner, WARP, MASK, device)
    target = target_model()
    if kind in LAYERS:
        target, layers = mtp_target("deepseek_v3", num_mtp_layers=LAYERS[kind])
        heads[kind] = lambda: mtp_head(layers)
    head = heads[kind]()
    drafter = head.to(device).drafter(target.to(device), WARP)
    runner = PreparedRunner(target, compiled=False, captured=True, hidden_layers=drafter.layers)
    runner.prepare(RunnerShapes(3, 60, (1, NUM_DRAFT_TOKENS + 1), decisions=decisions()))
    return runner, drafter


def pair(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[PreTrainedModel, PreTrainedModel]:
    if name == "llama":
        # Enough for a cache to mistake one for the other.
        changes.setdefault("num_hidden_layers", 2)
    target, draft = random_pair(name, **changes)
    return target.to(device, dtype), draft.to(device, dtype)


def decisions(
    warp: Warp = WARP, *, is_deterministic: bool = False
) -> dict[int, Sequence[Decision]]:
    """The decisions of a target, by the width of its extensions."""
    judge = Judge(warp, verify, is_deterministic=is_deterministic)
    return {1: [Draw(warp)], NUM_DRAFT_TOKENS + 1: [judge]}


def prepared(
    model: PreTrainedModel,
    batch_size: int = 3,
    num_drawn: int = 0,
    *,
    compiled: bool = False,
    captured: bool = True,
    warp: Warp = WARP,
) -> PreparedRunner:
    runner = PreparedRunner(model, compiled=compiled, captured=captured)
    widths = (1, 2) if num_drawn else (1, NUM_DRAFT_TOKENS + 1)
    runner.prepare(
        RunnerShapes(
            batch_size,
            60,
            widths,
            [num_drawn] if num_drawn else [],
            warp,
            {} if num_drawn else decisions(warp),
        )
    )
    return runner


def require_same(found: Sequence[Iteration], expected: Sequence[Iteration]) -> None:
    """Compare records, with the probabilities of their verdicts."""
    assert list(map(fields, found)) == list(map(fields, expected))
    for one, other in zip(found, expected, strict=True):
        assert (one.verdict is None) == (other.verdict is None)
        if one.verdict is not None and other.verdict is not None:
            assert other.verdict.num_accepted.tolist() == other.num_accepted
            for name in ("num_accepted", "next_token", "target_probability", "draft_probability"):
                torch.testing.assert_close(getattr(one.verdict, name), getattr(other.verdict, name))
