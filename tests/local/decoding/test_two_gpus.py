"""Target and draft on two GPUs decide what they decide on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from architectures import random_model, random_pair
from chains import fields, request
from harness.local.decoding.loop import Iteration, Loop
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.drafting.early_exit import truncated
from harness.local.drafting.model import ModelDrafter
from harness.local.drafting.translated import TranslatedDrafter, Translation
from harness.local.models.loading import cross_once
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from loops import speculative
from mtp_models import mtp_target
from pretended_gpus import pretended_gpus
from small_heads import (
    block_head,
    eagle_head,
    head_drafter,
    layer_config,
    medusa_head,
    mtp_head,
    target_model,
)
from text_drafters import lookup_drafter

WARP = Warp(1.0)
NUM_DRAFT_TOKENS = 3
# The number of MTP layers, by kind.
LAYERS = {"mtp": 1, "deep mtp": 3}
PROMPTS = [[5, 9, 3, 4, 7], [5, 9, 3], [5, 9, 10, 1, 2, 3]]
HEADS: dict[str, Callable[[], Any]] = {
    "eagle": lambda: eagle_head(layer_config("llama")),
    "block": block_head,
    "medusa": lambda: medusa_head(own_outputs=False),
}
# Every other token is the same in both vocabularies.
TRANSLATION = Translation(
    {token: token for token in range(0, 97, 2)},
    lambda tokens: [token // 2 * 2 for token in tokens],
    lambda token: [token // 2 * 2],
    97,
)


RUNNERS: dict[str, Callable[[PreTrainedModel], Runner]] = {
    "static": StaticRunner,
    "shared": lambda model: StaticRunner(model, shares_prefix=True),
}


def spread(model: PreTrainedModel, first: str, second: str) -> PreTrainedModel:
    """All but its first layer goes to the second device."""
    names = ["embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "rotary_emb"]
    places = {f"model.{name}": first if number < 2 else second for number, name in enumerate(names)}
    places["lm_head"] = second
    for name, place in places.items():
        model.get_submodule(name).to(place)
    cross_once(model, places, torch.device(first))
    return model


def drafting(kind: str, first: str, second: str) -> tuple[Runner, Drafter]:
    """A target on the first device, and a drafter for it, whose model is on the second."""
    if kind in LAYERS:
        target, layers = mtp_target("deepseek_v3", num_mtp_layers=LAYERS[kind])
        head = mtp_head(layers)
    elif kind in HEADS:
        target, head = target_model(), HEADS[kind]()
    elif kind == "spread, head":
        # Its matrices are on both devices: the head's own has a copy of the embedding.
        target = spread(target_model(), first, second)
        drafter = head_drafter(block_head().to(second), target, WARP)
        options = {"device": torch.device(first)}
        return StaticRunner(target, hidden_layers=drafter.layers, **options), drafter
    elif kind == "spread, early exit":
        target, options = (
            spread(random_model("llama"), first, second),
            {"device": torch.device(first)},
        )
        own = StaticRunner(truncated(target, 2), **options)
        return StaticRunner(target, **options), ModelDrafter(own, WARP, first)
    elif kind == "recurrent":
        return SnapshotRunner(random_model("lfm2").to(first)), lookup_drafter(first)
    else:
        target, draft = random_pair("llama", num_hidden_layers=2)
        make = RUNNERS.get(kind, RUNNERS["static"])
        runner, own = make(target.to(first)), make(draft.to(second))
        if kind == "translated":
            return runner, TranslatedDrafter(own, TRANSLATION, WARP, first)
        return runner, ModelDrafter(own, WARP, first)
    drafter = head_drafter(head.to(second), target.to(first), WARP)
    return StaticRunner(target, hidden_layers=drafter.layers), drafter


@pytest.fixture
def compared() -> Callable[..., None]:
    """Holds records of two GPUs against those of a CPU."""
    if torch.cuda.is_available():
        pytest.skip("for machines without")

    def compare(decode: Callable[[str, str], Iterator[Iteration]]) -> None:
        with pretended_gpus():
            expected = list(map(fields, decode("cpu", "cpu")))
            assert list(map(fields, decode("cuda:0", "cuda:1"))) == expected

    return compare


def on(device: str, warp: Warp = WARP, prompts: list[list[int]] = PROMPTS, length: int = 10) -> Any:
    what = request(prompts, warp, length)
    return replace(what, uniforms=what.uniforms.to(device))


@pytest.mark.parametrize(
    "kind",
    [*RUNNERS, *HEADS, "deep mtp", "translated", "recurrent", "spread, early exit", "spread, head"],
)
def test_records_are_those_of_a_cpu(kind: str, compared: Callable[..., None]) -> None:
    compared(
        lambda *devices: speculative(*drafting(kind, *devices), on(devices[0]), NUM_DRAFT_TOKENS)
    )


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_that_differ_leave_and_join(drafts: bool, compared: Callable[..., None]) -> None:
    """Caches grow, too."""

    def decode(first: str, second: str) -> Iterator[Iteration]:
        runner, drafter = drafting("static", first, second)
        warp = BatchWarp()
        loop = Loop(runner)
        if drafts:
            assert isinstance(drafter, ModelDrafter)
            drafter.warp = warp
            loop = Loop(runner, drafter, NUM_DRAFT_TOKENS, warp=warp)
        joining = [
            on(first, Warp(0.5, top_k=5), [[3, 4]], 8),
            on(first, Warp(0.7, top_p=0.8), [[9] * 120], 20),
        ]
        yield loop.add([on(first, Warp(0.9))])
        yield loop.step()
        loop.drop({1})
        yield loop.step()
        yield loop.add(joining)
        while loop.num_running:
            yield loop.step()

    compared(decode)
