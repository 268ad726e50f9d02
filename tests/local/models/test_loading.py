"""Real checkpoints through the whole way: settings in, a pair that runs out. And the devices they are on."""

import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.config.errors import RunError, SettingError
from harness.config.settings import Dtype, ModelSettings, PlacementSettings, Quantization
from harness.local.models import devices
from harness.local.models.checkpoints import resolve_dtype, stored_quantization
from harness.local.models.devices import check_gpu_numbers, peak_memory_bytes, visible_gpus
from harness.local.models.loading import LoadedModel
from harness.local.models.quiet import loading_bar, quiet_libraries
from tiny_checkpoints import (
    ARCHITECTURES,
    as_checkpoint,
    held_bytes,
    load_pair,
    make_config,
    shipped,
)

SaveModel = Callable[..., ModelSettings]
CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


@torch.no_grad()
def logits(model: PreTrainedModel, device: torch.device = CPU) -> torch.Tensor:
    return model(PROMPT.to(device)).logits.float().cpu()


def load(settings: ModelSettings, dtype: Dtype = "auto", **placement: Any) -> LoadedModel:
    return load_pair(settings, None, PlacementSettings(**placement), dtype).target


def about(num_bytes: int) -> Any:
    """What was predicted."""
    return pytest.approx(num_bytes, rel=0.01)


def saved(settings: ModelSettings) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(settings.repository, dtype=torch.float32).eval()


def test_attention_of_loaded_models_makes_no_plan_for_each_size() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load(*shipped("tiny"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("num_free", "several_s", "chosen"), [(1, 0.1, 1), (2, 0.1, 2), (2, 0.95, 1), (2, 9.0, 1)]
)
def test_a_model_on_the_cpu_takes_the_faster_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, num_free: int, several_s: float, chosen: int
) -> None:
    passes = {1: 1.0, 2: several_s}
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(devices, "num_usable_cores", lambda: 2)
    monkeypatch.setattr(devices, "num_free_cores", lambda: num_free)
    monkeypatch.setattr(devices, "_pass_seconds", lambda model, num_threads: passes[num_threads])
    torch.set_num_threads(4)
    devices._most_threads.cache_clear()
    try:
        load(*shipped("tiny"))
        assert torch.get_num_threads() == chosen
        # A model that takes one thread leaves the next one its choice.
        passes[2] = 0.1
        load(*shipped("tiny"))
        assert torch.get_num_threads() == num_free
        # A sweep's first job has decided.
        monkeypatch.setenv("HARNESS_SWEEP_THREADS", "2")
        load(*shipped("tiny"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
        devices._most_threads.cache_clear()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_what_is_loaded_is_what_was_saved(save_model: SaveModel, model_type: str) -> None:
    settings = save_model(model_type)
    pair = load_pair(settings, None, PlacementSettings())
    loaded = pair.target
    assert pair.draft is None
    assert torch.equal(logits(loaded.model), logits(saved(settings)))
    assert not loaded.model.training
    assert loaded.settings is settings
    assert loaded.dtype == torch.float32
    assert loaded.placement.device_map == {"": "cpu"}
    assert loaded.placement.bytes_per_device == {"cpu": about(held_bytes(loaded.model))}
    assert pair.devices == loaded.devices == [CPU]
    assert loaded.input_device == CPU
    assert len(pair.tokenizer) == 258


def test_half_precision(save_model: SaveModel) -> None:
    settings = save_model(dtype=torch.bfloat16)
    loaded = load(settings, "bfloat16")
    dtypes = {parameter.dtype for parameter in loaded.model.parameters()}
    assert dtypes == {loaded.dtype} == {torch.bfloat16}
    assert loaded.placement.bytes_per_device == {"cpu": about(held_bytes(loaded.model))}
    assert load(settings).dtype == torch.float32, "auto is float32 on the CPU"
    own = dataclasses.replace(settings, dtype="float32")
    # The model's own dtype goes before the run's.
    assert load(own, "bfloat16").dtype == torch.float32


def test_dtype_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    gpu, plain = torch.device("cuda", 0), as_checkpoint(make_config("llama"))
    eight = as_checkpoint(make_config("llama"), quantization="8bit")
    for stored, expected in (
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float32", torch.bfloat16),
    ):
        plain.config.dtype = getattr(torch, stored)
        assert resolve_dtype("auto", plain, gpu) == expected
        assert resolve_dtype("auto", plain, CPU) == torch.float32
    assert resolve_dtype("float16", plain, CPU) == torch.float16
    assert resolve_dtype("auto", eight, gpu) == torch.float16, "what LLM.int8() multiplies in"
    assert resolve_dtype("bfloat16", eight, gpu) == torch.bfloat16
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert resolve_dtype("auto", plain, gpu) == torch.float16


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize(("quantization", "error"), [("8bit", 0.05), ("4bit", 0.35)])
def test_quantized(
    save_model: SaveModel, model_type: str, quantization: Quantization, error: float
) -> None:
    settings = save_model(model_type, settings={"quantization": quantization})
    loaded = load(settings)
    # Before a forward pass, which repacks 4-bit weights on some CPUs.
    assert loaded.placement.bytes_per_device == {"cpu": about(held_bytes(loaded.model))}
    expected, quantized = logits(saved(settings)), logits(loaded.model)
    assert not torch.equal(quantized, expected), "the weights are not quantized"
    assert (quantized - expected).norm() / expected.norm() < error
    assert stored_quantization(loaded.model.config) == quantization


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_quantized_repository_loads_as_it_is(
    save_model: SaveModel, quantization: Quantization
) -> None:
    settings = save_model(settings={"quantization": quantization})
    quantized = load(settings).model
    # Before any forward pass: on some CPUs that repacks 4-bit weights.
    quantized.save_pretrained(settings.repository)
    same: tuple[Quantization, ...] = ("none", quantization)
    for asked in same:
        again = load(dataclasses.replace(settings, quantization=asked))
        assert torch.equal(logits(again.model), logits(quantized))
    other: Quantization = "4bit" if quantization == "8bit" else "8bit"
    with pytest.raises(SettingError, match=rf"^model\.quantization={other}: .* already"):
        load(dataclasses.replace(settings, quantization=other))


def test_other_quantizations_without_their_library(save_model: SaveModel) -> None:
    settings = save_model()
    config = make_config("llama")
    assert stored_quantization(config) is None
    config.quantization_config = {"quant_method": "aqlm"}
    config.save_pretrained(settings.repository)
    assert stored_quantization(config) == "aqlm"
    with pytest.raises(RunError, match=r"^model: .* is quantized with aqlm"):
        load(settings)


FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def with_configuration(settings: ModelSettings, quantization: dict[str, Any]) -> ModelSettings:
    """The model, whose configuration says that its weights are quantized."""
    file = Path(settings.repository, "config.json")
    stored = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(stored))
    return settings


def test_fp8_without_kernels_for_it_is_refused(save_model: SaveModel) -> None:
    rule = r"^model: .* is quantized with fp8, which does not load here: this device has no kernels"
    with pytest.raises(RunError, match=rule):
        load(with_configuration(save_model(), FP8))


@pytest.mark.parametrize("name", ["8bit", "4bit"])
def test_a_configuration_of_other_weights(save_model: SaveModel, name: str) -> None:
    bits = {f"load_in_{bits}": bits == name for bits in ("8bit", "4bit")}
    settings = with_configuration(save_model(), {"quant_method": "bitsandbytes", **bits})
    rule = rf"^model: its configuration describes weights in {name}, and .* has others: "
    with pytest.raises(RunError, match=rule):
        load(settings)


def test_bitsandbytes_that_is_missing_or_fails_on_this_device(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this device\nsecond line")

    settings = save_model(settings={"quantization": "4bit"})
    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", fail)
    with pytest.raises(RunError, match="cannot quantize to 4bit on the CPU: no kernel for"):
        load(settings)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(RunError, match=r"(?s)^model: 4bit needs bitsandbytes.*pip install"):
        load(settings)


@pytest.mark.parametrize("change", [{}, {"quantization": "8bit"}, {"dtype": "bfloat16"}])
def test_a_model_drafts_for_itself(save_model: SaveModel, change: dict[str, Any]) -> None:
    settings = save_model()
    pair = load_pair(settings, dataclasses.replace(settings, **change), PlacementSettings())
    assert pair.draft.model is not pair.target.model
    assert pair.target.dtype == torch.float32
    assert pair.draft.dtype == torch.bfloat16 if "dtype" in change else torch.float32


def test_nothing_loads_before_the_draft_is_checked(save_model: SaveModel, tmp_path: Path) -> None:
    target = save_model()
    Path(target.repository, "model.safetensors").write_bytes(b"loading these would fail")
    absent = dataclasses.replace(target, repository=str(tmp_path / "absent"))
    with pytest.raises(SettingError, match=r"^draft=.*absent: no such directory"):
        load_pair(target, absent, PlacementSettings())


def test_main_memory_that_is_too_small(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.local.engine.pair.free_memory", lambda gpus: {"cpu": 1_500_000})
    with pytest.raises(RunError, match=r"does not fit in harness.*\n.*model\.quantization=8bit"):
        load(save_model())


def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    from recipes.tiny_gguf import write

    (original,) = shipped("tiny_draft")
    write(Path(original.repository), tmp_path / "llama.gguf")
    settings = ModelSettings(name="gguf", repository=str(tmp_path), gguf_file="llama.gguf")
    pair = load_pair(settings, None, PlacementSettings())
    expected = load_pair(original, None, PlacementSettings())
    assert torch.equal(logits(pair.target.model), logits(expected.target.model))
    assert pair.target.placement.bytes_per_device["cpu"] == held_bytes(pair.target.model)
    text = "Once upon a time"
    assert pair.tokenizer(text)["input_ids"] == expected.tokenizer(text)["input_ids"]
    with pytest.raises(SettingError, match=r"^model\.quantization=4bit: .* already"):
        load(dataclasses.replace(settings, quantization="4bit"))
    with pytest.raises(SettingError, match=r"^model\.gguf_file=absent\.gguf: no such file"):
        load(dataclasses.replace(settings, gguf_file="absent.gguf"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RunError, match=r"gguf"):
        load(settings)


GPU = torch.device("cuda", 0)
# Wide enough for the allocator's rounding not to matter.
WIDE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 8,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "8bit", "4bit"])
def test_gpu_memory_is_as_predicted(save_model: SaveModel, quantization: Quantization) -> None:
    settings = save_model(settings={"quantization": quantization}, **WIDE)
    torch.cuda.synchronize()
    # What tensors asked for: the allocator's own count has up to 1 MiB more for each, which it does not split off.
    counted = "requested_bytes.all.current"
    before = torch.cuda.memory_stats(GPU).get(counted, 0)
    loaded = load(settings, "float16")
    taken = torch.cuda.memory_stats(GPU)[counted] - before
    assert loaded.placement.device_map == {"": 0}
    assert loaded.placement.bytes_per_device == {"cuda:0": pytest.approx(taken, rel=0.001)}
    assert loaded.devices == [GPU]
    assert loaded.input_device == GPU
    expected = logits(saved(settings))
    # Of random weights, which 4 bits keep worse than trained ones: 0.31 on an H200.
    error = {"none": 0.01, "8bit": 0.05, "4bit": 0.4}[quantization]
    assert (logits(loaded.model, GPU) - expected).norm() / expected.norm() < error


def test_cuda_that_does_not_start_is_an_error_and_not_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("Error 802: system not yet initialized")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(RunError, match="fabric manager"):
        visible_gpus()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert visible_gpus() == [0, 1, 2]


def test_memory_in_pools_of_graphs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(device: int, pool: tuple[int, int]) -> dict[str, Any]:
        sizes = {"total_size": 100, "allocated_size": 30}
        return {"device": device, "segment_pool_id": pool, **sizes}

    segments = [segment(0, (0, 0)), segment(0, (0, 1)), segment(0, (1, 0)), segment(1, (0, 1))]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert peak_memory_bytes([torch.device("cuda", 0), CPU]) == 1000 + 2 * 70
    assert peak_memory_bytes([torch.device("cuda", 1)]) == 1000 + 70


def test_more_gpus_than_there_are() -> None:
    model = ModelSettings(name="big", repository="x/y", gpus=4)
    four = PlacementSettings(gpus=4)
    # A model for GPUs runs where there are none.
    check_gpu_numbers(PlacementSettings(), {"model": model}, 0)
    with pytest.raises(
        SettingError, match=r"^placement\.gpus=4: must not exceed the number of GPUs, 0$"
    ):
        check_gpu_numbers(four, {}, 0)
    check_gpu_numbers(four, {"model": model}, 4)
    rule = r"must not exceed the number of GPUs, 3$"
    with pytest.raises(SettingError, match=rf"^placement\.gpus=4: {rule}"):
        check_gpu_numbers(four, {}, 3)
    with pytest.raises(SettingError, match=rf"^model\.gpus=4: {rule}"):
        check_gpu_numbers(PlacementSettings(), {"model": model}, 3)


FEW = torch.tensor([[1, 2, 3]])


def test_quantized_models_run_quietly(
    save_model: Callable[..., ModelSettings],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = save_model()

    @torch.no_grad()
    def run_quantized(quantization: Quantization, dtype: Dtype) -> None:
        quantized = dataclasses.replace(settings, quantization=quantization)
        load_pair(quantized, None, PlacementSettings(), dtype).target.model(FEW)

    capfd.readouterr()  # of saving
    run_quantized("8bit", "float32")
    run_quantized("4bit", "bfloat16")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    # That there is something to silence.
    monkeypatch.setattr("harness.local.models.quiet._matters", lambda record: True)
    monkeypatch.setattr(logging.getLogger("bitsandbytes.autograd._functions"), "filters", [])
    run_quantized("8bit", "bfloat16")
    assert caplog.text.count("MatMul8bitLt: inputs will be cast") == 3 * 7


def test_tensors_that_a_model_has_no_place_for_are_no_report(
    save_model: Callable[..., ModelSettings],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as layers for multi-token prediction."""
    quiet_libraries()
    directory = Path(save_model().repository)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.extra"] = torch.zeros(1)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    AutoModelForCausalLM.from_pretrained(directory)
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize(("size", "is_shown"), [(10**10, False), (10**10 + 1, True)])
def test_a_bar_is_shown_while_many_bytes_load(
    size: int, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    quiet_libraries()
    with loading_bar(size):
        assert transformers.utils.logging.is_progress_bar_enabled() == is_shown
    assert not transformers.utils.logging.is_progress_bar_enabled()
