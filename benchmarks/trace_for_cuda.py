"""Generates the code of compiled passes for a pretended H200, on a machine without a GPU: shows what a change of the
compiler's input does to the kernels of a layer before anybody pays for a GPU.

    python benchmarks/trace_for_cuda.py --model 7B --width 5 --code folder
    python benchmarks/trace_for_cuda.py --head gemma4 --width 4

Prints a JSON object for each part of a pass (before a layer, a layer, after it), or of a head's whole proposal of K
tokens (`--head`, K is the width; small heads with random weights): kernels of Triton with their names, calls of
libraries, and the shapes that the code allocates. tests/local/runners/test_cuda_code.py tests those of the smallest
model and of the heads. Needs torch's CUDA build with triton. With --traced it ends before the code, and a build
without CUDA traces for the CPU, which still shows whether everything that it takes from `regions` is there.

It changes torch for the whole process, which therefore does nothing else. Set TORCHINDUCTOR_COMPILE_THREADS=1: a pool
of compilers, for which there is nothing to do, may take minutes to end.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.compile_fx as inductor
import torch._inductor.fx_passes.joint_graph as joint_graph
from torch import Tensor, fx, nn
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

# The code of this tree, also where another one is installed, and the small heads of its tests.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests/support"))

from harness.local.decoding.protocols import Cached
from harness.local.decoding.warp import Warp
from harness.local.drafting.heads.prepared import PreparedHead
from harness.local.runners import attention, regions
from harness.local.runners.graphs import Call
from harness.local.runners.slots import SlotForward, Slots

# Llamas of two or three layers: all between the first and the last are the same.
MODELS: dict[str, dict[str, int]] = {
    "smallest": {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
    },
    "68m": {
        "num_hidden_layers": 2,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
    },
    "7B": {
        "num_hidden_layers": 2,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "8B": {
        "num_hidden_layers": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
OPTIONS = {
    "coordinate_descent_tuning": True,
    "size_asserts": False,
    "force_disable_caches": True,
    "joint_graph_constant_folding": False,
}
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=150 * 10**9,
    gcnArchName="",
    L2_cache_size=60 * 2**20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    is_integrated=0,
    is_multi_gpu_board=0,
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
)


class Generated(Exception):
    """The code of a graph, in place of its kernels, which cannot be loaded."""


class _Driver:
    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


def pretend_gpu() -> None:
    """Make torch believe in one H200."""
    properties: Any = lambda device=None: H200  # noqa: E731
    first: Any = lambda: 0  # noqa: E731
    cuda: Any = torch.cuda
    cuda.get_device_properties = properties
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.current_device = first
    cuda.device_count = lambda: 1
    interface: Any = device_interface.CudaInterface
    interface.get_device_properties = staticmethod(properties)
    interface.is_available = staticmethod(lambda: True)
    interface.get_compute_capability = staticmethod(lambda device=None: 90)
    interface.Worker.get_device_properties = staticmethod(properties)
    interface.Worker.current_device = staticmethod(first)
    interface.current_device = staticmethod(first)


def pretend_compiler() -> None:
    """Make triton believe in the same, and end a compilation with its code."""
    import triton

    patched: Any = joint_graph
    patched.lazy_init = lambda device=None: None
    patched = inductor
    patched._check_triton_bf16_support = lambda graph: None
    triton.runtime.driver.set_active(_Driver())
    lowering: Any = GraphLowering
    lowering.compile_to_module = _end_with_code


def choose_attention(kernel: str) -> None:
    """Take a kernel of attention as a GPU would; without CUDA torch takes another."""
    patched: Any = attention
    patched.scaled_dot_product_attention = {
        "cudnn": _cudnn_attention,
        "efficient": _efficient_attention,
    }[kernel]


def _cudnn_attention(
    queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None, **more: Any
) -> Tensor:
    """The kernel that torch takes on Hopper."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    causal = more.get("is_causal", False)
    scale = more.get("scale")
    return kernel(queries, keys, values, attn_mask, False, 0.0, causal, False, scale=scale)[0]


def _efficient_attention(
    queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None, **more: Any
) -> Tensor:
    """The kernel without cuDNN."""
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    causal = more.get("is_causal", False)
    scale = more.get("scale")
    bias = attn_mask
    if bias is not None:
        bias = bias.expand(*queries.shape[:3], keys.shape[2])
    return kernel(queries, keys, values, bias, False, 0.0, causal, scale=scale)[0]


def _end_with_code(graph: Any) -> None:
    code = graph.codegen()[0]
    raise Generated(getattr(code, "value", str(code)))


def parts_of(
    sizes: dict[str, int], batch_size: int, width: int, num_slots: int, dtype: torch.dtype
) -> list[fx.GraphModule]:
    """Return the parts of a pass over texts: before a layer, a layer, and after it.

    Args:
        sizes: of the model, arguments of `LlamaConfig`.
        width: the number of tokens of each row.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device("cuda" if torch.version.cuda else "cpu"):
        config = LlamaConfig(**sizes, tie_word_embeddings=False)  # type: ignore[arg-type]
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        head_size = sizes["hidden_size"] // sizes["num_attention_heads"]
        shape = (batch_size, sizes["num_key_value_heads"], num_slots, head_size)
        num_buffers = 2 * sizes["num_hidden_layers"]
        cache = [torch.zeros(shape, dtype=dtype) for _ in range(num_buffers)]
        tokens = torch.zeros(batch_size, width, dtype=torch.long)
        starts = torch.zeros(batch_size, dtype=torch.long)
        real = torch.zeros((), dtype=torch.long)
    call = functools.partial(SlotForward(model, {}), Slots(cache), tokens, starts, real)
    return _parts(call, model, mode)


def parts_of_head(
    kind: str, batch_size: int, num_drafted: int, num_slots: int, dtype: torch.dtype
) -> list[fx.GraphModule]:
    """Return the parts of a head's proposal of `num_drafted` tokens for each row."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = "cuda" if torch.version.cuda else "cpu"
    target, head = HEADS[kind]()
    # A head may read the keys and values of its target, whose layers may differ in shape.
    shapes = _shapes_of_cache(target) if head.config.cached_layers else []
    made: dict[int, Tensor] = {}
    with mode, torch.inference_mode():
        for module in (*target.modules(), *head.modules()):
            for tensors in (module._parameters, module._buffers):
                _become_fake(tensors, device, dtype, made)
        with torch.device(device):
            drafter = head.drafter(target, Warp(0.8))
            keys_and_values = [
                tuple(
                    torch.zeros(batch_size, heads, num_slots, size, dtype=dtype) for _ in range(2)
                )
                for heads, size in shapes
            ]
            drafter.target_runner = SimpleNamespace(
                cached=lambda layers: Cached(
                    [keys_and_values[layer] for layer in layers], is_fixed=True
                )
            )
            vocabulary_size = target.config.get_text_config().vocab_size
            proposals = PreparedHead(
                drafter, target, vocabulary_size, compiled=False, captured=False
            )
            proposals.prepare(batch_size, num_slots, (num_drafted,))
            example = proposals._example(batch_size, num_drafted)
    return _parts(functools.partial(proposals._eager(num_drafted), *example), head, mode)


def _shapes_of_cache(target: Any) -> list[tuple[int, int]]:
    """The heads of each layer's keys and values, and their size."""
    cache = DynamicCache()
    with torch.inference_mode():
        target(input_ids=torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    return [(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers]


def _become_fake(
    tensors: dict[str, Any], device: str, dtype: torch.dtype, made: dict[int, Tensor]
) -> None:
    """Replace the tensors of a module by fake ones on the device; shared ones stay shared by `made`."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if id(tensor) not in made:
            is_weight = isinstance(tensor, nn.Parameter)
            fake = torch.empty_like(tensor, device=device, dtype=dtype if is_weight else None)
            made[id(tensor)] = nn.Parameter(fake, requires_grad=False) if is_weight else fake
        tensors[name] = made[id(tensor)]


def _of_tests(module: str, kind: str) -> Any:
    return getattr(importlib.import_module(module), kind)


def _gemma4_pair() -> tuple[Any, Any]:
    target = _of_tests("gemma4_models", "target_of")("gemma4", 3)
    config = _of_tests("gemma4_models", "assistant_config")("gemma4", True)
    assistant = _of_tests("gemma4_models", "assistant_of")(config)
    return target, _of_tests("gemma4_models", "head_of")(target, assistant)


def _mtp_pair(family: str) -> tuple[Any, Any]:
    target, layers = _of_tests("mtp_models", "mtp_target")(family)
    return target, _of_tests("small_heads", "mtp_head")(layers)


def _small_head(kind: str, *arguments: Any) -> tuple[Any, Any]:
    """A head over a small Llama."""
    target = _of_tests("small_heads", "target_model")()
    return target, _of_tests("small_heads", kind)(*arguments)


def _eagle3_pair() -> tuple[Any, Any]:
    layer = _of_tests("small_heads", "layer_config")("llama")
    return _small_head("eagle_head", layer)


# A target and its head, by the kind of the head: Gemma 4's assistant with centroids, layers for multi-token
# prediction in Qwen's layout, Domino with its recurrent part, and the two that most others resemble.
HEADS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "eagle3": _eagle3_pair,
    "dflash": functools.partial(_small_head, "block_head"),
    "domino": functools.partial(_small_head, "domino_head"),
    "mtp": functools.partial(_mtp_pair, "qwen3_5_text"),
    "mtp_moe": functools.partial(_mtp_pair, "qwen3_5_moe_text"),
    "gemma4": _gemma4_pair,
}


def _parts(call: Call, model: nn.Module, mode: FakeTensorMode) -> list[fx.GraphModule]:
    """Return the parts of a call of a model, each once."""
    with torch.inference_mode(), regions._layers_marked(model), regions._PlainTensors(), mode:
        traced = make_fx(call, tracing_mode="real")()
    _tensors_to_inputs(traced)
    whole = regions._split_by_layer(traced)
    parts: dict[str, fx.GraphModule] = {}
    for node in whole.graph.find_nodes(op="call_module"):
        part: Any = whole.get_submodule(node.target)
        parts.setdefault(regions._signature(part.graph), part)
    return list(parts.values())


def _tensors_to_inputs(traced: fx.GraphModule) -> None:
    """Do as in `regions`, with tensors that are fake already."""
    inputs: dict[str, fx.Node] = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        if node.target not in inputs:
            with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
                inputs[node.target] = traced.graph.placeholder(node.target)
            inputs[node.target].meta["val"] = getattr(traced, node.target)
        node.replace_all_uses_with(inputs[node.target])
        traced.graph.erase_node(node)


def code_of(part: fx.GraphModule) -> str:
    """Return the code that inductor generates for a part."""
    with torch.inference_mode():
        try:
            regions._compile(part, OPTIONS)
        except Exception as error:
            # Inductor wraps it in an error of its own.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, Generated):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            return str(cause)
    raise AssertionError("compiled without a GPU")


def summary(code: str) -> dict[str, Any]:
    """Count what a part launches, and list the shapes that it allocates."""
    body = code[code.index("def call(") :]
    libraries = re.findall(r"extern_kernels\.(\w+)\(|torch\.ops\.aten\.([\w.]+)\(", body)
    allocated = re.findall(r"empty_strided_cuda\(\(([^)]*)\)", body)
    shapes = [[int(size) for size in shape.split(",") if size.strip()] for shape in allocated]
    return {
        "triton": len(re.findall(r"\w+\.run\(", body)),
        "kernels": re.findall(r"async_compile\.triton\('(\w+)'", code),
        "libraries": ["".join(names) for names in libraries],
        "allocated": shapes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="smallest")
    parser.add_argument("--head", choices=HEADS, help="in place of a model")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--width", type=int, default=1, help="tokens of each row; of a head, K")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", choices=("cudnn", "efficient"), default="cudnn")
    parser.add_argument("--code", type=Path, help="folder for the code of each part")
    parser.add_argument("--traced", action="store_true", help="only count operations")
    options = parser.parse_args()
    pretend_gpu()
    if torch.version.cuda:
        choose_attention(options.attention)
    if not options.traced:
        pretend_compiler()
    sizes = (options.batch_size, options.width, options.slots, getattr(torch, options.dtype))
    parts = (
        parts_of_head(options.head, *sizes)
        if options.head
        else parts_of(MODELS[options.model], *sizes)
    )
    for number, part in enumerate(parts):
        if options.traced:
            calls = [node for node in part.graph.nodes if node.op == "call_function"]
            print(json.dumps({"operations": len(calls)}))
            continue
        code = code_of(part)
        print(json.dumps(summary(code)))
        if options.code is not None:
            options.code.mkdir(parents=True, exist_ok=True)
            (options.code / f"part_{number}.py").write_text(code)


if __name__ == "__main__":
    main()
