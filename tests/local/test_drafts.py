"""The contract of every draft: greedy texts are the target's own, of a row alone and of ragged rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from architectures import random_model
from chains import GREEDY
from harness.local.decoding.protocols import Drafter
from harness.local.drafting.early_exit import truncated
from harness.local.drafting.model import ModelDrafter, ParallelDrafter
from harness.local.drafting.translated import TranslatedDrafter, Translation
from harness.local.runners.static import StaticRunner
from head_references import PROMPTS, check_greedy
from mtp_models import mtp_target
from small_heads import (
    block_head,
    domino_head,
    eagle_head,
    head_drafter,
    layer_config,
    medusa_head,
    mtp_head,
    selector_head,
    target_model,
)
from text_drafters import lookup_drafter, suffix_drafter

# Every other token is the same in both vocabularies.
HALF = Translation(
    {token: token for token in range(0, 97, 2)},
    lambda tokens: [token // 2 * 2 for token in tokens],
    lambda token: [token // 2 * 2, 1] if token % 3 else [token // 2 * 2],
    97,
)


def own_model() -> StaticRunner:
    return StaticRunner(random_model("llama", seed=1))


def with_head(make_head: Callable[[], Any]) -> Callable[[Any], Drafter]:
    return lambda target: head_drafter(make_head(), target, GREEDY)


DRAFTS: dict[str, Callable[[Any], Drafter]] = {
    "model": lambda target: ModelDrafter(own_model(), GREEDY),
    "model that agrees": lambda target: ModelDrafter(StaticRunner(target), GREEDY),
    "early exit": lambda target: ModelDrafter(StaticRunner(truncated(target, 2)), GREEDY),
    "parallel": lambda target: ParallelDrafter(own_model(), GREEDY, 96),
    "translated": lambda target: TranslatedDrafter(own_model(), HALF, GREEDY),
    "lookup": lambda target: lookup_drafter(),
    "suffix": lambda target: suffix_drafter(),
    "EAGLE-3": with_head(lambda: eagle_head(layer_config("llama"))),
    "P-EAGLE": with_head(lambda: eagle_head(layer_config("qwen3"), mask_token_id=96)),
    "DFlash": with_head(block_head),
    "DSpark": with_head(lambda: block_head(from_anchor=True, markov_rank=6)),
    "DFlash 2": with_head(selector_head),
    "Domino": with_head(domino_head),
    "Medusa": with_head(lambda: medusa_head(True)),
}


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_texts_are_those_of_generate(
    name: str, model_type: str, prompts: list[list[int]]
) -> None:
    target = target_model(model_type)
    check_greedy(target, DRAFTS[name](target), prompts=prompts)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("number", [1, 3])
def test_greedy_texts_with_mtp_are_those_of_generate(number: int, prompts: list[list[int]]) -> None:
    target, layers = mtp_target("deepseek_v3", num_mtp_layers=number)
    check_greedy(target, head_drafter(mtp_head(layers), target, GREEDY), prompts=prompts)
