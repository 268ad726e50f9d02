from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from harness.config.commands import RunnerName
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings, ModelSettings, PlacementSettings
from harness.decoding.loops import Request
from harness.decoding.randomness import uniforms
from harness.experiments.arms import players, resolve, warp
from harness.models.loading import Pair, plan_pair

DECODING = DecodingSettings(max_new_tokens=12, num_draft_tokens=3)
PROMPTS = [[40, 50, 60], [70, 80, 90, 100, 110]]


def load(model: ModelSettings, draft: ModelSettings | None) -> Pair:
    return plan_pair(model, draft, PlacementSettings(), "float32").load()


def written(pair: Pair, runner: RunnerName) -> tuple[str, dict[str, list[list[list[int]]]]]:
    taking_part = players(pair, DECODING, runner=runner, batch_size=2, longest_prompt=5)
    what = Request(PROMPTS, uniforms(0, range(2), 13), warp(DECODING), 12)
    texts = {arm.name: [record.tokens for record in arm.decode(what)] for arm in taking_part.arms(DECODING)}
    assert (taking_part.setup_seconds > 0) == ("compiled" in taking_part.runner)
    return taking_part.runner, texts


def test_each_runner_writes_the_same(save_model: Callable[..., ModelSettings]) -> None:
    pair = load(
        save_model(num_hidden_layers=1, max_position_embeddings=64), save_model("gpt2", n_layer=1, vocab_size=320)
    )
    name, expected = written(pair, "eager")
    assert name == "eager"
    for runner in ("auto", "static", "compiled"):
        assert written(pair, runner) == ("eager" if runner == "auto" else runner, expected)  # type: ignore[arg-type]


@pytest.mark.slow
def test_4_bit_weights_are_compiled_as_well(save_model: Callable[..., ModelSettings]) -> None:
    model = dataclasses.replace(save_model(num_hidden_layers=1), quantization="4bit")
    pair = load(model, save_model("gpt2", n_layer=1, vocab_size=320))
    assert getattr(pair.target.model, "is_loaded_in_4bit", False)
    name, texts = written(pair, "compiled")
    assert name == "compiled"
    assert texts == written(pair, "eager")[1]


def test_a_model_that_cannot_have_the_runner_gets_the_eager_one(
    save_model: Callable[..., ModelSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = load(save_model("bloom", hidden_size=32, n_layer=1, n_head=4), save_model(num_hidden_layers=1))
    name, texts = written(pair, "static")
    assert name == "eager+static"
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "runner=eager" in line]
    assert said.endswith("bloom takes no positions; it runs with runner=eager")
    assert texts == written(pair, "eager")[1]


def test_what_cannot_be_compiled_is_still_captured(
    save_model: Callable[..., ModelSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing is captured; the fixed shapes that would be are there."""
    # A configuration that no other test compiles: the code of one serves all models of the same configuration.
    draft = save_model("gpt2", n_layer=1, vocab_size=320, layer_norm_epsilon=1e-3)
    pair = load(save_model(num_hidden_layers=1), draft)
    assert pair.draft is not None
    expected = written(pair, "eager")[1]
    norm = pair.draft.model.transformer.ln_f
    original = norm.forward
    norm.forward = lambda states: original(states) * (1 if states.sum().item() else 2)
    monkeypatch.setattr("harness.experiments.arms.resolve", lambda runner, devices: runner)
    taking_part = players(pair, DECODING, runner="graphs", batch_size=2, longest_prompt=5)
    assert taking_part.runner == "graphs+graphs_only"
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "it runs with" in line]
    assert "cannot be compiled: " in said
    assert said.endswith("it runs with runner=graphs_only")
    what = Request(PROMPTS, uniforms(0, range(2), 13), warp(DECODING), 12)
    assert {arm.name: [record.tokens for record in arm.decode(what)] for arm in taking_part.arms(DECODING)} == expected


@pytest.mark.parametrize("runner", ["graphs", "graphs_only"])
def test_graphs_need_cuda(runner: RunnerName) -> None:
    with pytest.raises(SettingError, match="needs a CUDA device"):
        resolve(runner, [torch.device("cpu")])
    assert resolve(runner, [torch.device("cuda:0")]) == runner


def test_auto_is_resolved() -> None:
    assert resolve("auto", [torch.device("cpu")]) == "eager"
    assert resolve("auto", [torch.device("cuda:0")]) == "graphs"
    assert {resolve(name, [torch.device("cuda:0")]) for name in get_args(RunnerName)} == set(get_args(RunnerName)) - {
        "auto"
    }
