"""Generates the code of compiled passes for a pretended H200, on a machine without a GPU.

    python cuda_code.py WIDTH

Prints a JSON object for each part of a pass over WIDTH tokens: kernels of Triton, calls of libraries, and the shapes
that the code allocates. Needs torch's CUDA build with triton. It changes torch for the whole process, which therefore
does nothing else.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.compile_fx as inductor
import torch._inductor.fx_passes.joint_graph as joint_graph
import triton
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM, LlamaConfig
from triton.backends.compiler import GPUTarget

from harness.local.runners import attention, regions
from harness.local.runners.slots import SlotForward, Slots

NUM_SLOTS = 512
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
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


def pretend() -> None:
    """Make torch and triton believe in one H200, and end a compilation with its code."""
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
    patched: Any = joint_graph
    patched.lazy_init = lambda device=None: None
    patched = inductor
    patched._check_triton_bf16_support = lambda graph: None
    triton.runtime.driver.set_active(_Driver())
    patched = attention
    patched.scaled_dot_product_attention = _cudnn_attention
    lowering: Any = GraphLowering
    lowering.compile_to_module = _end_with_code


def _cudnn_attention(
    queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None, **more: Any
) -> Tensor:
    """The kernel that torch takes on Hopper; without CUDA it takes another."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    causal = more.get("is_causal", False)
    scale = more.get("scale")
    return kernel(queries, keys, values, attn_mask, False, 0.0, causal, False, scale=scale)[0]


def _end_with_code(graph: Any) -> None:
    code = graph.codegen()[0]
    raise Generated(getattr(code, "value", str(code)))


def parts_of(width: int) -> list[fx.GraphModule]:
    """Return the parts of a pass over so many tokens: before a layer, a layer, and after it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device("cuda"):
        config = LlamaConfig(
            num_hidden_layers=3,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=97,
            tie_word_embeddings=False,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        cache = [torch.zeros(1, 2, NUM_SLOTS, 8, dtype=torch.bfloat16) for _ in range(6)]
        tokens = torch.zeros(1, width, dtype=torch.long)
        starts, real = torch.zeros(1, dtype=torch.long), torch.zeros((), dtype=torch.long)
    call = functools.partial(SlotForward(model, {}), Slots(cache), tokens, starts, real)
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
        "libraries": ["".join(names) for names in libraries],
        "allocated": shapes,
    }


if __name__ == "__main__":
    pretend()
    for part in parts_of(int(sys.argv[1])):
        print(json.dumps(summary(code_of(part))))
