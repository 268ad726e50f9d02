"""Target and draft on two GPUs decide what they decide on a CPU."""

from dataclasses import replace

import pytest
import torch

from architectures import random_model
from chains import requests, row_steps, speculative
from drafts import DRAFTS, lookup_drafter, spread
from harness.local.decoding.loop import RowStep
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.warp import AnyWarp, Warp
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from pretended_gpus import pretended_gpus
from small_heads import block_head, head_drafter, target_model

WARP = Warp(1.0)
NUM_DRAFT_TOKENS = 3
PROMPTS = [[5, 9, 3, 4, 7], [5, 9, 3], [5, 9, 10, 1, 2, 3]]


def drafting(kind: str, warp: AnyWarp, first: str, second: str) -> tuple[Runner, Drafter]:
    """A target on the first device, and a drafter for it, whose model is on the second."""
    if kind == "recurrent":
        return SnapshotRunner(random_model("lfm2").to(first)), lookup_drafter()
    if kind == "spread, head":
        # Its matrices are on both devices: the head's own has a copy of the embedding.
        target = spread(target_model(), first, second)
        drafter: Drafter = head_drafter(block_head().to(second), target, warp)
    else:
        target, drafter = DRAFTS[kind](warp, first, second)
    return StaticRunner(target, hidden_layers=drafter.layers), drafter


def decode(kind: str, first: str, second: str) -> list[RowStep]:
    runner, drafter = drafting(kind, WARP, first, second)
    plain = requests(PROMPTS, WARP, 10)
    asked = [replace(request, uniforms=request.uniforms.to(first)) for request in plain]
    return row_steps(speculative(runner, drafter, asked, NUM_DRAFT_TOKENS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without")
@pytest.mark.parametrize("kind", ["model", "EAGLE-3", "recurrent", "spread, head"])
def test_records_are_those_of_a_cpu(kind: str) -> None:
    with pretended_gpus():
        assert decode(kind, "cuda:0", "cuda:1") == decode(kind, "cpu", "cpu")
