"""Models without their weights: planned as they are, built as planned, and the same every time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import compute_module_sizes

from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, PlacementSettings, Quantization
from harness.local.drafting.method import Pair
from harness.local.engine.pair import plan_pair
from harness.local.models.loading import LoadedModel
from tiny_checkpoints import SMALL_DEMAND, as_draft, held_bytes, make_config

SaveModel = Callable[..., ModelSettings]
PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
# Presets' architectures, scaled down; wide enough that scales and tables of quantized weights are few.
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def preset(
    name: str = "30B", quantization: Quantization = "none", **architecture: Any
) -> ModelSettings:
    return ModelSettings(
        name=name,
        repository=f"nobody/{name}",
        quantization=quantization,
        architecture={"model_type": "llama", **SIZES} | architecture,
    )


def load(target: ModelSettings, draft: ModelSettings | None = None, **placement: Any) -> Pair:
    asked = draft and as_draft(draft), PlacementSettings(**placement), "bfloat16"
    return plan_pair(target, *asked, weights="random").place(SMALL_DEMAND).load()


@torch.no_grad()
def logits(loaded: LoadedModel) -> torch.Tensor:
    return loaded.model(PROMPT).logits.float()


@pytest.mark.parametrize(
    ("quantization", "sizes"),
    [
        ("none", {"model_type": "llama"}),
        ("none", {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4}),
        ("none", {"model_type": "bloom", "n_head": 4, "n_layer": 3}),
        ("8bit", {"model_type": "llama"}),
        ("4bit", {"model_type": "opt", "word_embed_proj_dim": 256, "ffn_dim": 512}),
    ],
)
def test_what_is_held_is_what_was_planned(
    quantization: Quantization, sizes: dict[str, Any]
) -> None:
    loaded = load(preset(quantization=quantization, **sizes)).target
    planned_bytes = sum(loaded.placement.bytes_per_device.values())
    assert planned_bytes == pytest.approx(held_bytes(loaded.model), rel=0.01)
    kinds = {type(module).__name__ for module in loaded.model.modules()}
    assert {"none": set(), "8bit": {"Linear8bitLt"}, "4bit": {"Linear4bit"}}[quantization] <= kinds
    assert torch.isfinite(logits(loaded)).all()
    assert not loaded.model.training
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert not any(tensor.is_meta for tensor in tensors)


@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_the_same_every_time_and_another_for_every_model(quantization: Quantization) -> None:
    first = logits(load(preset(quantization=quantization)).target)
    assert torch.equal(first, logits(load(preset(quantization=quantization)).target))
    assert not torch.equal(first, logits(load(preset("65B", quantization=quantization)).target))


def test_tied_matrices_are_one(save_model: SaveModel) -> None:
    model = load(preset(model_type="gpt2", n_embd=256, n_layer=1, n_head=4)).target.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert compute_module_sizes(model)[""] == held_bytes(model)


def test_formats_that_cannot_be_random(save_model: SaveModel) -> None:
    settings = save_model()
    config = make_config("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(settings.repository)
    with pytest.raises(SettingError, match=r"^weights=random: .* quantized with gptq"):
        load(settings)
    with pytest.raises(SettingError, match=r"^weights=random: .* GGUF"):
        load(dataclasses.replace(settings, gguf_file="model.gguf"))


def test_vocabularies_are_held_against_each_other_by_size() -> None:
    pair = load(preset(), preset("7B", vocab_size=990))
    assert len(pair.tokenizer) == 990, "one family pads to different numbers of rows"
    with pytest.raises(SettingError, match=r"^draft=7B: .* model=30B: 500 outputs against 1000"):
        load(preset(), preset("7B", vocab_size=500))
