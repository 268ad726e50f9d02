"""Draft models with another tokenizer, or with draws of their own, draft by prepared calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chains import request
from harness.config.demand import Demand
from harness.config.settings import DecodingSettings, ModelSettings, PlacementSettings
from harness.engines.record import Preparation
from harness.local.decoding.loops import speculative
from harness.local.decoding.warp import Warp
from harness.local.drafting.methods.model import ModelDraftSettings
from harness.local.drafting.translated import TranslatedDrafter, Translation
from harness.local.engine.pair import plan_pair
from harness.local.engine.pair_runners import open_runners
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.prepared_calls import RunnerShapes
from harness.local.runners.static import StaticRunner
from prepared_pairs import WARP, pair

PROMPTS = [[5, 9, 3, 4, 7, 1, 8], [11, 3], [10, 1, 6]]


def translation() -> Translation:
    """Odd tokens are unknown to the draft, and every seventh of these is two of its own."""

    def spell(token: int) -> list[int]:
        return [token // 2 * 2] * (2 if token % 14 == 7 else 1)

    def prompt_into_draft(tokens: Sequence[int]) -> list[int]:
        return [own for token in tokens for own in spell(token)]

    common = {token: token for token in range(0, 97, 2)}
    return Translation(common, prompt_into_draft, spell, 97)


def test_a_draft_with_another_tokenizer_draws_in_one_prepared_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = pair("llama")
    between = translation()
    prepared = PreparedRunner(draft, compiled=False, captured=True)
    prepared.prepare(RunnerShapes(3, 60, (1, 2), [3], between.drawing_warp(WARP)))

    def decided(runner: Any, prompts: list[list[int]]) -> list[Any]:
        drafter = TranslatedDrafter(runner, between, WARP)
        what = request(prompts, WARP, length=20)
        records = speculative(StaticRunner(target), drafter, what, 3)
        return [(record.rows, record.tokens, record.proposed) for record in records]

    drawn_eagerly: list[Any] = []
    original = StaticRunner.draw
    for prompts in (PROMPTS, PROMPTS[:1]):
        expected = decided(StaticRunner(draft), prompts)
        with monkeypatch.context() as patch:
            patch.setattr(StaticRunner, "draw", lambda *a: drawn_eagerly.append(a) or original(*a))
            patch.setattr(
                "harness.local.decoding.randomness.draw", lambda *a: drawn_eagerly.append(a)
            )
            assert decided(prepared, prompts) == expected
        assert not drawn_eagerly


def test_draft_tokens_that_are_drawn_greedily_are_prepared(
    save_model: Callable[..., ModelSettings],
) -> None:
    """With `draft.sampling=greedy` the draft's warp is not the target's."""
    model = save_model(num_hidden_layers=1, max_position_embeddings=64)
    stored = save_model("gpt2", n_layer=1, vocab_size=320, n_positions=64)
    draft = ModelDraftSettings(name=stored.name, repository=stored.repository, sampling="greedy")
    demand = Demand(
        batch_size=1, prompt_tokens=5, new_tokens=12, num_draft_tokens=3, runner="eager"
    )
    loaded = plan_pair(model, draft, PlacementSettings(), "float32").place(demand).load()
    decoding = DecodingSettings(max_new_tokens=12, num_draft_tokens=3, temperature=0.7)
    warps: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedRunner, "prepare", lambda self, shapes: warps.append(shapes.warp))
        preparation = Preparation(decoding=decoding, runner="compiled", longest_prompt=5)
        open_runners(loaded, preparation).close()
    assert warps == [Warp(0.7), Warp(0)]
