"""Where layers go, on pretended GPUs; and predicted bytes against those that loading takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from accelerate.utils import compute_module_sizes
from transformers import AutoConfig, PreTrainedModel

from harness.config.errors import RunError, SettingError
from harness.config.settings import ModelSettings, PlacementSettings, Quantization
from harness.models.checkpoints import Checkpoint
from harness.models.fitting import place_pair
from harness.models.loading import load_pair, make_room, plan_pair
from harness.models.placement import Candidate, Placement, place
from harness.models.sizes import bytes_per_device, count_parameters, empty_model
from tiny_checkpoints import as_checkpoint, held_bytes, make_config

GB = 10**9
BALANCED = PlacementSettings()
NO_RESERVE = PlacementSettings(reserve_gb=0)

LLAMA = {
    "1B": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    "7B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "13B": {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40},
    "65B": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 22016, "num_attention_heads": 64},
}


def llama(size: str, role: str = "model", **settings: Any) -> Checkpoint:
    config = AutoConfig.for_model("llama", vocab_size=32000, **LLAMA[size])
    return as_checkpoint(config, role, name=size, **settings)


@cache
def empty(size: str, quantization: Quantization = "none", dtype: torch.dtype = torch.float16) -> PreTrainedModel:
    return empty_model(llama(size), dtype, quantization)


def machine(*gpus_gb: float, cpu_gb: float = 100) -> dict[int | str, int]:
    """Free bytes of a pretended machine."""
    return {i: int(gb * GB) for i, gb in enumerate(gpus_gb)} | {"cpu": int(cpu_gb * GB)}


def target_alone(
    checkpoint: Checkpoint,
    free: dict[int | str, int],
    placement: PlacementSettings = BALANCED,
    dtype: torch.dtype = torch.float16,
) -> Placement:
    placed, draft = place_pair(Candidate(checkpoint, dtype), None, placement, free)
    assert draft is None
    return placed


def with_draft(
    target: Checkpoint, draft: Checkpoint, free: dict[int | str, int], placement: PlacementSettings = BALANCED
) -> tuple[Placement, Placement]:
    placed, beside = place_pair(Candidate(target, torch.float16), Candidate(draft, torch.float16), placement, free)
    assert beside is not None
    return placed, beside


def layers_in_order(placed: Placement) -> list[int | str]:
    layers = {int(key.split(".")[2]): device for key, device in placed.device_map.items() if ".layers." in key}
    return [layers[i] for i in sorted(layers)]


def test_known_sizes() -> None:
    assert count_parameters(llama("7B")) == 6_738_415_616
    assert count_parameters(llama("13B")) == 13_015_864_320
    assert compute_module_sizes(empty("13B"))[""] == pytest.approx(26.03 * GB, rel=1e-3)
    # One byte a weight of the linear layers, two a weight of the embedding and the output layer (5120 x 32000 each).
    outer = 2 * 5120 * 32000
    assert compute_module_sizes(empty("13B", "8bit"))[""] == pytest.approx(13_015_864_320 - outer + 2 * outer, rel=1e-3)
    # Half a byte and 1/64 byte of scales; bitsandbytes' own figure for 4-bit with double quantization is 4.127 bits.
    nf4 = compute_module_sizes(empty("13B", "4bit"))[""] - 2 * outer
    assert 8 * nf4 / (13_015_864_320 - outer) == pytest.approx(4.127, rel=1e-3)


def test_balanced_spreads_evenly_and_in_order() -> None:
    placed = target_alone(llama("13B"), machine(24, 24, 24, 24))
    assert set(placed.bytes_per_device) == {"cuda:0", "cuda:1", "cuda:2", "cuda:3"}
    assert sum(placed.bytes_per_device.values()) == compute_module_sizes(empty("13B"))[""]
    assert max(placed.bytes_per_device.values()) < 1.3 * min(placed.bytes_per_device.values())
    devices = layers_in_order(placed)
    assert devices == sorted(devices)
    assert len(devices) == 40


def test_sequential_fills_one_after_the_other() -> None:
    sequential = PlacementSettings(strategy="sequential")
    placed = target_alone(llama("13B"), machine(24, 24, 24, 24), sequential)
    assert set(placed.bytes_per_device) == {"cuda:0", "cuda:1"}
    # Filled up to the reserve, but for less than one layer.
    assert 22 * GB - 0.7 * GB < placed.bytes_per_device["cuda:0"] <= 22 * GB


@pytest.mark.parametrize("strategy", ["balanced", "auto", "sequential", "single"])
def test_one_gpu_that_is_large_enough(strategy: Any) -> None:
    placed = target_alone(llama("13B"), machine(40), PlacementSettings(strategy=strategy))
    assert placed.device_map == {"": 0}
    assert not placed.offloaded


def test_single_takes_the_roomiest() -> None:
    single = PlacementSettings(strategy="single")
    assert target_alone(llama("13B"), machine(24, 40, 30), single).device_map == {"": 1}
    with pytest.raises(RunError, match=r"one GPU has 22\.0 GB free"):
        target_alone(llama("13B"), machine(24, 24), single)


def test_limit_on_gpus_takes_the_first() -> None:
    two = PlacementSettings(gpus=2)
    assert set(target_alone(llama("13B"), machine(24, 24, 24, 24), two).bytes_per_device) == {"cuda:0", "cuda:1"}
    own = llama("13B", gpus=2)
    assert set(target_alone(own, machine(24, 24, 24, 24)).bytes_per_device) == {"cuda:0", "cuda:1"}
    assert set(target_alone(own, machine(1, 24, 24, 1)).bytes_per_device) == {"cuda:1", "cuda:2"}


def test_uneven_gpus_are_filled_although_balance_is_impossible() -> None:
    placed = target_alone(llama("13B"), machine(20, 4, 12))
    limits = {"cuda:0": 18 * GB, "cuda:1": 2 * GB, "cuda:2": 10 * GB}
    assert all(taken <= limits[device] for device, taken in placed.bytes_per_device.items())
    assert sum(placed.bytes_per_device.values()) == compute_module_sizes(empty("13B"))[""]


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("quantization", ["none", "8bit", "4bit"])
@pytest.mark.parametrize("strategy", ["balanced", "sequential"])
def test_no_device_gets_more_than_it_has(gpus: int, quantization: Quantization, strategy: Any) -> None:
    model = empty("13B", quantization)
    size = compute_module_sizes(model)[""]
    # From hopeless through tight to roomy.
    verdicts = []
    for share in (0.9, 1.02, 1.1, 1.3, 2):
        budget: dict[int | str, int] = {"cpu": 0} | dict.fromkeys(range(gpus), int(size * share / gpus))
        device_map = place(model, budget, PlacementSettings(strategy=strategy))
        verdicts.append(device_map is not None)
        if device_map is not None:
            taken = bytes_per_device(model, device_map)
            assert sum(taken.values()) == size
            assert all(n <= budget[int(device.removeprefix("cuda:"))] for device, n in taken.items())
    assert verdicts[0] is False
    assert verdicts[-2:] == [True, True]
    assert verdicts == sorted(verdicts)


def test_a_tight_fit_on_two_gpus_is_not_refused() -> None:
    # accelerate by itself keeps one layer's room on the first GPU, and would send the last layer to the CPU.
    model = empty("13B")
    budget: dict[int | str, int] = {0: 13_200_000_000, 1: 13_200_000_000, "cpu": 0}
    assert place(model, budget, BALANCED) is not None


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(RunError) as raised:
        target_alone(llama("13B"), machine(16))
    first, second = str(raised.value).splitlines()
    assert first == (
        "model: 13B does not fit: its weights need 26.0 GB in float16, one GPU has 14.0 GB free beyond "
        "placement.reserve_gb"
    )
    assert second == (
        "what would fit: model.quantization=8bit (13.4 GB), model.quantization=4bit (7.2 GB), "
        "2 GPUs with as much free, placement.offload=cpu (slow) (force=true tries anyway)"
    )


def test_remedies_are_only_those_that_help() -> None:
    with pytest.raises(RunError) as raised:
        target_alone(llama("65B"), machine(24, 24, cpu_gb=16))
    text = str(raised.value)
    assert "need 130.6 GB in float16, 2 GPUs have 22.0 GB + 22.0 GB free" in text
    assert "quantization=4bit (34." in text
    assert "8bit" not in text
    # 6 times 22 GB would be enough, but not for layers of 1.6 GB.
    assert "7 GPUs with as much free" in text
    assert "offload" not in text
    with pytest.raises(RunError, match="a smaller model is needed"):
        target_alone(llama("65B", quantization="4bit"), machine(2.1, cpu_gb=1))


def test_unused_gpus_are_a_remedy() -> None:
    with pytest.raises(RunError, match=r"spread over all GPUs \(placement.strategy=balanced"):
        target_alone(llama("13B"), machine(24, 24), PlacementSettings(gpus=1))


def test_without_a_gpu_everything_is_the_cpus() -> None:
    for strategy in ("balanced", "auto", "sequential", "single", "cpu"):
        placed = target_alone(llama("1B"), machine(), PlacementSettings(strategy=strategy))
        assert placed.device_map == {"": "cpu"}
    assert target_alone(llama("1B"), machine(24), PlacementSettings(strategy="cpu")).device_map == {"": "cpu"}
    with pytest.raises(RunError) as raised:
        target_alone(llama("7B"), machine(cpu_gb=16), dtype=torch.float32)
    first, second = str(raised.value).splitlines()
    assert "need 27.0 GB in float32, 16.0 GB of main memory are free" in first
    assert second.startswith("what would fit: dtype=bfloat16 (13.5 GB), model.quantization=8bit (")
    assert "GPU" not in second


def test_draft_goes_whole_onto_what_is_left() -> None:
    target, draft = with_draft(llama("13B"), llama("1B", "draft"), machine(24, 24))
    assert set(target.bytes_per_device) == {"cuda:0", "cuda:1"}
    assert len(draft.device_map) == 1
    (where,) = draft.device_map.values()
    assert where == min((0, 1), key=lambda gpu: target.bytes_per_device[f"cuda:{gpu}"])


def test_draft_is_split_where_no_gpu_holds_it_whole() -> None:
    target, draft = with_draft(llama("13B"), llama("7B", "draft"), machine(24, 24))
    assert set(draft.bytes_per_device) == {"cuda:0", "cuda:1"}
    for gpu in ("cuda:0", "cuda:1"):
        assert target.bytes_per_device[gpu] + draft.bytes_per_device[gpu] <= 22 * GB


def test_draft_that_no_longer_fits() -> None:
    with pytest.raises(RunError) as raised:
        with_draft(llama("13B"), llama("7B", "draft"), machine(32))
    text = str(raised.value)
    assert text.startswith("draft: 7B does not fit beside the model: its weights need 13.5 GB in float16, one GPU has")
    assert "4.0 GB free" in text
    assert "draft.quantization=4bit" in text


def test_draft_settings_override_the_runs() -> None:
    free = machine(40, 40)
    _, draft = with_draft(llama("13B"), llama("1B", "draft", placement="cpu"), free)
    assert draft.device_map == {"": "cpu"}
    _, draft = with_draft(llama("13B"), llama("1B", "draft", gpus=2), free)
    assert set(draft.bytes_per_device) == {"cuda:0", "cuda:1"}
    single = PlacementSettings(strategy="single")
    target, draft = with_draft(llama("13B"), llama("1B", "draft"), free, single)
    assert target.device_map == {"": 0}
    assert draft.device_map == {"": 1}


def test_both_are_counted_on_the_cpu() -> None:
    with pytest.raises(RunError, match=r"^draft: 1B does not fit beside the model"):
        with_draft(llama("7B"), llama("1B", "draft"), machine(cpu_gb=15))


def test_offload_only_when_asked_and_only_the_rest() -> None:
    free = machine(16, cpu_gb=64)
    with pytest.raises(RunError):
        target_alone(llama("13B"), free)
    placed = target_alone(llama("13B"), free, PlacementSettings(offload="cpu"))
    assert placed.offloaded
    assert set(placed.bytes_per_device) == {"cuda:0", "cpu"}
    # One layer's room stays free on the GPU, to bring in the layers that lie outside.
    assert 12.5 * GB < placed.bytes_per_device["cuda:0"] < 13.5 * GB
    with pytest.raises(RunError):
        target_alone(llama("13B"), machine(16, cpu_gb=8), PlacementSettings(offload="cpu"))
    disk = target_alone(llama("13B"), machine(16, cpu_gb=8), PlacementSettings(offload="disk"))
    assert set(disk.bytes_per_device) == {"cuda:0", "disk"}
    assert target_alone(llama("13B"), machine(40), PlacementSettings(offload="cpu")).device_map == {"": 0}


def test_offloaded_layers_are_not_quantized() -> None:
    placed = target_alone(llama("13B", quantization="8bit"), machine(10), PlacementSettings(offload="cpu"))
    on_cpu = sum(device == "cpu" for device in layers_in_order(placed))
    per_layer = 4 * 5120**2 + 3 * 5120 * 13824
    # The output layer, in float16, lies behind the layers.
    assert placed.bytes_per_device["cpu"] == pytest.approx(2 * (on_cpu * per_layer + 5120 * 32000), rel=1e-3)


def test_disk_takes_what_main_memory_does_not() -> None:
    placed = target_alone(llama("7B"), machine(cpu_gb=10), PlacementSettings(offload="disk"))
    assert placed.bytes_per_device["cpu"] <= 10 * GB
    assert placed.bytes_per_device["disk"] > 3 * GB


def test_tied_weights_count_once_and_stay_together() -> None:
    config = AutoConfig.for_model("llama", vocab_size=128256, tie_word_embeddings=True, **LLAMA["1B"])
    checkpoint = as_checkpoint(config)
    model = empty_model(checkpoint, torch.float16)
    assert compute_module_sizes(model)[""] == pytest.approx(2 * count_parameters(checkpoint), rel=1e-3)
    placed = target_alone(checkpoint, machine(1.6, 1.6, 1.6), NO_RESERVE)
    assert len(placed.bytes_per_device) == 3
    assert placed.device_map["model.embed_tokens"] == placed.device_map["lm_head"]


def test_blocks_are_never_divided() -> None:
    placed = target_alone(llama("13B"), machine(24, 24, 24, 24))
    assert not [key for key in placed.device_map if key.count(".") > 2]


EXPLICIT = {"model.embed_tokens": 0, "model.layers": "cuda:1", "model.norm": 1, "model.rotary_emb": 1, "lm_head": "1"}


def test_explicit_map() -> None:
    explicit = PlacementSettings(device_map=EXPLICIT)
    placed = target_alone(llama("7B"), machine(4, 24), explicit)
    assert placed.device_map["model.layers"] == 1
    assert placed.bytes_per_device["cuda:0"] == 2 * 4096 * 32000
    # It is the target's; the draft goes where there is room.
    _, draft = with_draft(llama("7B"), llama("1B", "draft"), machine(4, 24), explicit)
    assert draft.device_map == {"": 1}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"lm_head": 2},
            SettingError,
            r"^placement\.device_map=2: must name devices .* \(0, 1, cpu, disk\)$",
        ),
        ({"lm_head": "mars"}, SettingError, r"=mars: must name devices"),
        ({"lm_haed": 0}, SettingError, r"=lm_haed: must name modules of LlamaForCausalLM"),
        ({"lm_head": None}, SettingError, r"must cover the whole model; lm_head\.weight lies nowhere"),
        ({"model.layers": 0}, RunError, r"puts 13\.2 GB of 7B on cuda:0, and 4\.0 GB are free there"),
    ],
)
def test_explicit_map_that_cannot_be(change: dict[str, Any], error: type[Exception], says: str) -> None:
    device_map = {key: device for key, device in (EXPLICIT | change).items() if device is not None}
    with pytest.raises(error, match=says):
        target_alone(llama("7B"), machine(4, 24), PlacementSettings(device_map=device_map))


def test_quantized_repository_cannot_be_offloaded() -> None:
    config = AutoConfig.for_model("llama", vocab_size=32000, **LLAMA["13B"])
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    with pytest.raises(SettingError, match="cannot lie outside the GPUs: its weights are quantized already"):
        target_alone(as_checkpoint(config), machine(5), PlacementSettings(offload="cpu"))


SaveModel = Callable[..., ModelSettings]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("quantization", ["none", "8bit", "4bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_predicted_bytes_are_those_that_loading_takes(
    save_model: SaveModel, model_type: str, quantization: Quantization, dtype: Any
) -> None:
    settings = save_model(model_type, settings={"quantization": quantization})
    loaded = load_pair(settings, None, PlacementSettings(), dtype).target
    assert loaded.placement.bytes_per_device["cpu"] == pytest.approx(held_bytes(loaded.model), rel=0.01)


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_predicted_bytes_of_a_quantized_repository(save_model: SaveModel, quantization: Quantization) -> None:
    settings = save_model(settings={"quantization": quantization})
    quantized = load_pair(settings, None, PlacementSettings()).target
    quantized.model.save_pretrained(settings.repository)
    again = load_pair(dataclasses.replace(settings, quantization="none"), None, PlacementSettings()).target
    assert again.placement.bytes_per_device["cpu"] == pytest.approx(held_bytes(again.model), rel=0.01)
    assert again.placement.bytes_per_device == quantized.placement.bytes_per_device


def test_models_that_declare_no_blocks_are_not_split() -> None:
    model = empty_model(as_checkpoint(make_config("llama")), torch.float32)
    model._no_split_modules = None
    assert place(model, {0: 2_000_000, 1: 2_000_000, "cpu": 0}, NO_RESERVE) is None
    assert place(model, {0: 2_000_000, 1: 2_200_000, "cpu": 0}, NO_RESERVE) == {"": 1}


def test_a_cache_beyond_the_reserve_takes_room_beside_its_layers() -> None:
    # 40 layers of 1 GB each: no room beside the weights on one GPU, and half of it on each of two.
    candidate = Candidate(llama("13B"), torch.float16, [GB] * 40)
    with pytest.raises(RunError, match=r"and the KV cache \(40\.0 GB\)"):
        place_pair(candidate, None, BALANCED, machine(48))
    placed, _ = place_pair(candidate, None, BALANCED, machine(48, 48))
    assert sum(placed.cache_per_device.values()) == 40 * GB
    for gpu in ("cuda:0", "cuda:1"):
        assert placed.bytes_per_device[gpu] + placed.cache_per_device[gpu] <= 48 * GB
    # Filling one GPU after the other, layers make way for their own keys and values.
    placed, _ = place_pair(candidate, None, PlacementSettings(strategy="sequential"), machine(48, 48))
    for gpu in ("cuda:0", "cuda:1"):
        assert placed.bytes_per_device[gpu] + placed.cache_per_device[gpu] <= 48 * GB
    # Within the reserve it changes nothing.
    small = dataclasses.replace(candidate, cache=[10**7] * 40)
    assert place_pair(small, None, BALANCED, machine(30))[0].device_map == {"": 0}


def test_force_places_what_does_not_fit() -> None:
    target, draft = Candidate(llama("13B"), torch.float16), Candidate(llama("7B", "draft"), torch.float16)
    with pytest.raises(RunError, match=r"\(force=true tries anyway\)$"):
        place_pair(target, draft, BALANCED, machine(16, 8))
    placed, beside = place_pair(target, draft, BALANCED, machine(16, 8), force=True)
    assert beside is not None
    assert sum(placed.bytes_per_device.values()) == target.weight_bytes
    assert sum(beside.bytes_per_device.values()) == draft.weight_bytes
    assert not placed.offloaded
    assert place_pair(target, None, BALANCED, machine(cpu_gb=1), force=True)[0].device_map == {"": "cpu"}


def test_remedies_are_the_pairs() -> None:
    # In 8 bits the model would fit alone, but not beside its draft.
    target, draft = Candidate(llama("13B"), torch.float16), Candidate(llama("7B", "draft"), torch.float16)
    with pytest.raises(RunError) as raised:
        place_pair(target, draft, BALANCED, machine(16, cpu_gb=1))
    both = "what would fit: model.quantization=4bit (7.2 GB) with draft.quantization=4bit (3.9 GB), 3 GPUs with as much"
    assert both in str(raised.value)


def test_a_planned_pair_makes_room_for_its_caches(save_model: SaveModel) -> None:
    planned = plan_pair(save_model("llama"), save_model("gpt2"), PlacementSettings())
    roomy = make_room(planned, PlacementSettings(), batch_size=4, num_tokens=100)
    assert roomy.placements[0].bytes_per_device == planned.placements[0].bytes_per_device
    # 3 layers of 2 heads of 32 numbers, and of 4 heads, keys and values in float32.
    assert [sum(p.cache_per_device.values()) for p in roomy.placements] == [
        4 * 100 * 3 * 2 * h * 32 * 4 for h in (2, 4)
    ]
    with pytest.raises(RunError, match="beyond the KV cache") as raised:
        make_room(planned, PlacementSettings(), batch_size=10**6, num_tokens=1000)
    (less,) = re.findall(r"a batch_size \(or texts\) (\d+) times smaller", str(raised.value))
    make_room(planned, PlacementSettings(), batch_size=10**6 // int(less), num_tokens=1000)
    forced = make_room(planned, PlacementSettings(), batch_size=10**6, num_tokens=1000, force=True)
    assert forced.devices == planned.devices
