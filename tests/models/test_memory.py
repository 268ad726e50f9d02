"""The KV cache that is predicted against the one a run holds, bytes that a forward reads, and names of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import compute_module_sizes
from transformers import AutoConfig, AutoModelForCausalLM

from harness.config.settings import ModelSettings, PlacementSettings
from harness.models.loading import load_pair
from harness.models.memory import bytes_read, cache_bytes_per_device, cache_bytes_per_layer, known_gpu
from harness.models.sizes import empty_model
from harness.runners.eager import EagerRunner
from tiny_checkpoints import as_checkpoint, make_config


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "bloom", "gpt_neo", "gpt_neox", "qwen2"])
def test_the_cache_is_as_large_as_predicted(model_type: str) -> None:
    config = make_config(model_type) if model_type in ("llama", "gpt2", "opt") else _small(model_type)
    before = config.to_dict()
    predicted = cache_bytes_per_layer(as_checkpoint(config), torch.bfloat16, batch_size=3, num_tokens=7)
    assert config.to_dict() == before, "the model is loaded from it"
    assert config._attn_implementation is None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    runner = EagerRunner(model)
    runner.start([[5, 6, 7, 8]] * 3)
    runner.extend(torch.full((3, 3), 9))
    assert predicted == [layer.keys.nbytes + layer.values.nbytes for layer in runner._layers()]
    device_map: dict[str, int | str] = {"": 0}
    assert cache_bytes_per_device(model, device_map, predicted) == {"cuda:0": sum(predicted)}


def _small(model_type: str) -> Any:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= {"num_key_value_heads": 2} if model_type == "qwen2" else {}
    others = {
        "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2},
        "gpt_neo": {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global"], 2]]},
    }
    return AutoConfig.for_model(model_type, vocab_size=320, **others.get(model_type, sizes))


def test_the_cache_lies_beside_its_layers() -> None:
    config = make_config("llama")
    model = empty_model(as_checkpoint(config), torch.float16)
    around: dict[str, int | str] = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 1, "lm_head": 1}
    layers: dict[str, int | str] = {"model.layers.0": 0, "model.layers.1": 1, "model.layers.2": 1}
    assert cache_bytes_per_device(model, around | layers, [10, 20, 30]) == {"cuda:0": 10, "cuda:1": 50}
    # What lies outside the GPUs is computed on the first of them.
    offloaded: dict[str, int | str] = layers | {"model.layers.2": "cpu"}
    assert cache_bytes_per_device(model, around | offloaded, [10, 20, 30]) == {"cuda:0": 40, "cuda:1": 20}


def test_a_model_that_cannot_be_asked_has_no_known_cache() -> None:
    config = make_config("llama")
    config.num_key_value_heads = 3  # of 4 heads: no model runs so
    assert cache_bytes_per_layer(as_checkpoint(config), torch.float16, 1, 1) == []


def test_a_forward_reads_everything_but_what_it_looks_up() -> None:
    untied = empty_model(as_checkpoint(make_config("llama", tie_word_embeddings=False)), torch.float16)
    assert bytes_read(untied) == sum(p.nbytes for p in untied.parameters()) - 2 * 320 * 128
    tied = empty_model(as_checkpoint(make_config("llama", tie_word_embeddings=True)), torch.float16)
    assert bytes_read(tied) == sum(p.nbytes for p in tied.parameters()) == bytes_read(untied)
    # GPT-2 ties its embedding of words; that of positions is looked up.
    gpt2 = empty_model(as_checkpoint(make_config("gpt2")), torch.float16)
    assert bytes_read(gpt2) == sum(p.nbytes for p in gpt2.parameters()) - 2 * 64 * 128
    quantized = empty_model(as_checkpoint(make_config("llama")), torch.float16, "4bit")
    assert bytes_read(quantized) < 0.5 * bytes_read(untied)


def test_idle_experts_are_not_read() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        "mixtral", vocab_size=320, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, **sizes
    )
    model = empty_model(as_checkpoint(config), torch.float32)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert experts == 2 * 8 * 3 * 32 * 64 * 4
    others = compute_module_sizes(model)[""] - experts - sum(b.nbytes for b in model.buffers())
    assert bytes_read(model) == others - 4 * 320 * 32 + experts // 4


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100X", None),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_gpus_are_known_by_the_names_that_torch_gives(device: str, name: str | None) -> None:
    gpu = known_gpu(device)
    assert (gpu and gpu.name) == name


# On a GPU ------------------------------------------------------------------------------------------------------------

SEVEN_BILLION = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "8bit", "4bit"])
def test_peak_memory_of_a_7b_shape_is_as_planned(save_model: Any, quantization: Any) -> None:
    settings: ModelSettings = save_model(
        dtype=torch.float16, settings={"quantization": quantization, "gpus": 1}, vocab_size=32000, **SEVEN_BILLION
    )
    # What other tests of this process still hold is not this model's.
    before = torch.cuda.memory_allocated()
    loaded = load_pair(settings, None, PlacementSettings(), "float16").target
    batch_size, prompt_length, num_new = 4, 500, 12
    torch.cuda.reset_peak_memory_stats()
    runner = EagerRunner(loaded.model)
    runner.start([[5] * prompt_length] * batch_size)
    for _ in range(num_new):
        runner.extend(torch.full((batch_size, 1), 9, device=loaded.input_device))
    peak = torch.cuda.max_memory_allocated() - before
    cache = cache_bytes_per_layer(
        as_checkpoint(loaded.model.config), torch.float16, batch_size, prompt_length + num_new
    )
    assert peak == pytest.approx(sum(loaded.placement.bytes_per_device.values()) + sum(cache), rel=0.05)
