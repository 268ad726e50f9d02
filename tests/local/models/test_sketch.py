"""A sketch against its model: bytes of weights and of the cache, what a forward reads, where it splits."""

import dataclasses
import functools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, PreTrainedConfig

from architectures import RECURRENT, random_model
from harness.config.demand import Demand
from harness.config.settings import Quantization
from harness.local.models.fit import fit
from harness.local.models.sketch import (
    Sketch,
    TensorSketch,
    bare_model,
    four_bit_bytes,
    sketch_model,
    sketch_tensor,
)
from harness.local.runners.snapshot import SnapshotRunner, map_tensors
from sketches import GB, case, gpus_of, machine
from sketches import sketch as by_hand
from tiny_checkpoints import as_checkpoint, make_config

LLAMA = {
    "1B": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    "13B": {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40},
}  # fmt: skip


@functools.cache
def llama(size: str, quantization: Quantization = "none", **config: Any) -> Sketch:
    configured = AutoConfig.for_model("llama", **{"vocab_size": 32000} | LLAMA[size] | config)
    return sketch_model(as_checkpoint(configured, quantization=quantization), torch.float16)


def sketched(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float16, **settings: Any
) -> Sketch:
    return sketch_model(as_checkpoint(config, **settings), dtype)


def parameter_bytes(config: PreTrainedConfig, dtype: torch.dtype = torch.float16) -> int:
    return sum(p.nbytes for p in bare_model(as_checkpoint(config), dtype).parameters())


def test_known_sizes() -> None:
    assert llama("13B").num_parameters == 13_015_864_320
    assert llama("13B").weight_bytes == pytest.approx(26.03 * GB, rel=1e-3)
    # One byte a weight of the linear layers, two a weight of the embedding and the output layer (5120 x 32000 each).
    outer = 2 * 5120 * 32000
    in_8_bits = 13_015_864_320 - outer + 2 * outer
    assert llama("13B", "8bit").weight_bytes == pytest.approx(in_8_bits, rel=1e-3)
    # Half a byte and 1/64 byte of scales; bitsandbytes' own figure for 4-bit with double quantization is 4.127 bits.
    nf4 = llama("13B", "4bit").weight_bytes - 2 * outer
    assert 8 * nf4 / (13_015_864_320 - outer) == pytest.approx(4.127, rel=1e-3)
    # The same sketch held in another way is the other sketch.
    held = dataclasses.replace(llama("1B"), quantization="4bit")
    assert held.weight_bytes == llama("1B", "4bit").weight_bytes


def test_weights_in_buffers_are_read() -> None:
    config = make_config("llama")
    config.quantization_config = {"quant_method": "bitnet"}
    packed = [each for each in sketched(config).tensors if each.itemsize == 1]
    assert {each.read_per_token for each in packed} == {1.0}


def test_tied_weights_stay_together() -> None:
    tied = llama("1B", vocab_size=128256, tie_word_embeddings=True)
    assert tied.weight_bytes == pytest.approx(2 * tied.num_parameters, rel=1e-3), "counted once"
    (one,) = fit(case(tied, free=machine(1.1, 1.1, 1.1), reserve_gb=0, strategy="balanced"))
    assert len(gpus_of(one)) == 3
    assert one.device_map["model.embed_tokens"] == one.device_map["lm_head"]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom", "gpt_neo"])
def test_the_cache_is_as_large_as_predicted(model_type: str) -> None:
    model = random_model(model_type)
    before = model.config.to_dict()
    predicted = sketched(model.config, torch.float32)
    assert model.config.to_dict() == before, "the model is loaded from it"
    runner = SnapshotRunner(model)
    runner.start([[5, 6, 7, 8]] * 3)
    runner.extend(torch.full((3, 3), 9), [4, 4, 4])
    (cache,) = runner._ahead.values.values()
    held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert predicted.cache_sizes(3 * 7, 0) == held


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_model_is_held_before_and_after_what_is_drafted(name: str) -> None:
    model, sizes = random_model(name), []
    predicted = sketched(model.config, torch.float32)
    runner = SnapshotRunner(model)
    runner.start([[5, 6, 7, 8]] * 3)
    runner.extend(torch.full((3, 3), 9), [4, 4, 4])
    for state in (runner._state, runner._ahead):
        map_tensors(lambda _, tensor: sizes.append(tensor.nbytes) or tensor, state.values)
    assert sum(sizes) == sum(predicted.cache_sizes(num_tokens=3 * (4 + 7), num_states=3 * 2))
    assert predicted.state_bytes > 0
    assert sum(predicted.cache_sizes(1, 0)) + predicted.state_bytes == sum(
        predicted.cache_sizes(1, 1)
    )
    (placed,) = fit(case(predicted, free=machine(), demand=Demand(3, 4, 1, 2, "static")))
    assert placed.cache_per_device["cpu"] == sum(predicted.cache_sizes(3 * (7 + 7), 3 * 2))
    (undrafted,) = fit(case(predicted, free=machine(), demand=Demand(3, 4, 1, 0, "eager")))
    assert undrafted.cache_per_device["cpu"] == sum(predicted.cache_sizes(3 * 5, 3))


def test_the_cache_is_where_its_layers_are() -> None:
    one = sketched(make_config("llama"))
    layer = sum(one.cache_sizes(1, 0)) // 3
    ends = {"model.norm": 1, "model.rotary_emb": 1, "lm_head": 1}
    around: dict[str, int | str] = {"model.embed_tokens": 0, **ends}
    layers: dict[str, int | str] = {"model.layers.0": 0, "model.layers.1": 1, "model.layers.2": 1}
    free, demand = machine(10, 10), Demand(1, 1, 0, 0, "eager")
    placed = case(one, free=free, demand=demand).placed(one, around | layers)
    assert placed.cache_per_device == {"cuda:0": layer, "cuda:1": 2 * layer}


def test_the_cache_of_a_model_that_cannot_be_asked_is_not_counted() -> None:
    assert sketched(AutoConfig.for_model("gemma4")).about_cache is None
    config = make_config("llama")
    config.num_key_value_heads = 3  # of 4 heads: no model runs so
    predicted = sketched(config)
    assert not predicted.knows_cache
    assert predicted.about_cache is not None
    assert predicted.about_cache.endswith("KV cache: it is not counted")


def test_a_forward_reads_everything_but_what_it_looks_up() -> None:
    untied, tied = (make_config("llama", tie_word_embeddings=tie) for tie in (False, True))
    assert sketched(untied).read_bytes() == parameter_bytes(untied) - 2 * 320 * 128
    assert sketched(tied).read_bytes() == parameter_bytes(tied) == sketched(untied).read_bytes()
    # GPT-2 ties its embedding of words; that of positions is looked up.
    gpt2 = make_config("gpt2")
    assert sketched(gpt2).read_bytes() == parameter_bytes(gpt2) - 2 * 64 * 128
    assert sketched(untied, quantization="4bit").read_bytes() < 0.5 * sketched(untied).read_bytes()


SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip


def test_idle_experts_are_not_read() -> None:
    config = AutoConfig.for_model("mixtral", num_local_experts=8, num_experts_per_tok=2, **SMALL)
    experts = 2 * 8 * 3 * 32 * 64 * 4
    others = parameter_bytes(config, torch.float32) - experts
    sketch = sketched(config, torch.float32)
    assert sketch.read_bytes() == others - 4 * 320 * 32 + experts // 4
    # Five tokens with 2 of 8 experts each take 8 (1 − 0.75⁵) = 6.1 different ones.
    five_tokens = others - 4 * 320 * 32 + experts * (1 - 0.75**5)
    assert sketch.read_bytes(5) == pytest.approx(five_tokens, rel=1e-6)
    assert sketch.read_bytes(1000) == others - 4 * 320 * 32 + experts


def test_a_pass_reads_no_more_of_the_cache_than_the_windows_have() -> None:
    windows = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16}
    windows["num_hidden_layers"] = 6
    config = AutoConfig.for_model("gemma3_text", **SMALL | windows)
    layer_bytes = 2 * 2 * 8 * 2
    sketch = sketched(config)
    # One of six layers sees everything. The runner keeps all.
    assert sum(sketch.cache_sizes(3000, 3)) == 6 * 3000 * layer_bytes
    read = sketch.read_bytes(3)
    assert sketch.pass_bytes(3, 1000) - read == (3000 + 5 * 3 * 16) * layer_bytes
    assert sketch.pass_bytes(3, 10) - read == 6 * 30 * layer_bytes
    assert sketch.pass_bytes(3, 10, 2) - sketch.read_bytes(6) == 6 * 30 * layer_bytes


def test_stored_quantization_is_read() -> None:
    one = sketched(make_config("llama"), torch.float32)
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantized = sketched(make_config("llama", quantization_config=stored), torch.float32)
    assert quantized.stored == "4bit"
    assert quantized.num_parameters == one.num_parameters, "quantized or not"
    assert four_bit_bytes(65) == 33 + 64 + 2 + 4 + 4 + 1024
    # 256 scales, in float32 or in 8 bits.
    assert four_bit_bytes(64 * 256, nested=False) == 64 * 128 + 64 + 4 * 256
    assert four_bit_bytes(64 * 256) == 64 * 128 + 64 + 256 + 4 + 4 + 1024


def test_weights_that_another_library_quantized_keep_their_bytes() -> None:
    """Each number of a wider format has the format that the model is loaded in."""
    sizes = {}
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.int32, torch.bfloat16):
        module = torch.nn.Linear(4, 2, bias=False)
        module.weight = torch.nn.Parameter(torch.zeros(2, 4, dtype=dtype), requires_grad=False)
        model: Any = SimpleNamespace(config=make_config("llama"))
        sketch = sketch_tensor(model, module, "weight", module.weight, quantizable=False)
        sizes[dtype] = sketch.nbytes(torch.float32, "none")
    assert [*sizes.values()] == [8, 8, 32, 32]


def test_bytes_of_one_tensor_and_those_that_are_borrowed() -> None:
    """Two tokens that choose one of 4 experts each read 7 of 16 parts of them."""
    matrix, other = TensorSketch(1000, outputs=10), TensorSketch(1000, 4)
    expert = TensorSketch(1000, read_per_token=0.25)
    assert [one.nbytes(torch.float16, "8bit") for one in (matrix, other)] == [1040, 4000]
    alone = by_hand(3, cache=7)
    borrowing = dataclasses.replace(alone, borrowed_tensors=(expert,))
    assert borrowing.read_bytes(2) - alone.read_bytes(2) == 2000 * 7 // 16
    assert alone.pass_bytes(1, 5) - alone.read_bytes() == 3 * 5 * 7 * 2
    assert (sum(alone.cache_sizes(1, 0)), alone.state_bytes) == (3 * 7 * 2, 0)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made and not yet freed, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        made = function(*arguments, **(named or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


@pytest.mark.parametrize(
    "sizes",
    [
        {"model_type": "llama"},
        {"model_type": "gemma2", "head_dim": 16},
        {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4},
        {
            "model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 8, "top_k_experts": 4,
            "moe_intermediate_size": 352, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
            "head_dim": 16, "global_head_dim": 16,
        },
    ],
    ids=lambda sizes: sizes["model_type"],
)  # fmt: skip
def test_what_a_pass_works_with_is_about_what_reading_prompts_takes(sizes: dict[str, Any]) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = bare_model(as_checkpoint(make_config(**{**shape, **heads, **sizes})), torch.float32)
    model.to_empty(device="cpu").eval()
    most = []
    for num_rows in (2, 4):
        tokens = torch.zeros(num_rows, 32, dtype=torch.long)
        with _LiveBytes() as live:
            model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        most.append(live.most)
    numbers_per_token = (most[1] - most[0]) / (2 * 32 * 4)
    estimate = sketched(model.config).pass_numbers
    assert 0.9 * numbers_per_token < estimate < 2 * numbers_per_token
