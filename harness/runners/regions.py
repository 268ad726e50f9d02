"""Compiles a model's forward pass over given tensors, with equal layers compiled once.

The graph of a forward pass is cut where a layer begins and ends, and parts that compute the same
share their code: the regional compilation of PyTorch's recipes, without a new compilation for each
layer's index.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from harness.runners.graphs import Call

# A product of more rows than this is left to a library. Matrices of so many numbers stay in a
# core's cache.
_FEW_ROWS = 8
_CACHED = 1 << 17

# Compiled parts, by what they compute: models of the same sizes share them.
_compiled: dict[str, Callable[..., Any]] = {}


def compile_call(call: Call, model: nn.Module) -> Call:
    """Compile a call of a model: a pass over the same tensors every time.

    The result neither looks for the tensors again nor checks them, which takes a tenth of a small
    model's pass.

    Raises an error of torch where the call depends on values of tensors: while it is traced they
    have none.
    """
    with _layers_marked(model), _PlainTensors():
        traced = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)()
    _tensors_to_inputs(traced)
    whole = _split_by_layer(traced)
    options = _options(next(model.parameters()).device)
    for node in whole.graph.find_nodes(op="call_module"):
        part = whole.get_submodule(node.target)
        assert isinstance(part, fx.GraphModule)
        signature = _signature(part.graph)
        if signature not in _compiled:
            _compiled[signature] = _compile(part, options)
        node.op = "call_function"
        node.target = _compiled[signature]
    whole.recompile()
    placeholders = traced.graph.find_nodes(op="placeholder")
    tensors = [getattr(traced, node.target) for node in placeholders]
    return functools.partial(whole.forward, *tensors)


def _options(device: torch.device) -> dict[str, Any]:
    """Return options of inductor."""
    # Without tuning Triton's products of a matrix and a vector stay below the memory's bandwidth.
    # The tensors are the same in every pass, so that their sizes need no check. A product and its
    # sum are one instruction. Whether g++ knows the processor's instructions is not tried out,
    # which takes it 3 s: if not, the first kernel fails.
    return {
        "coordinate_descent_tuning": device.type == "cuda",
        "size_asserts": False,
        "cpp.enable_floating_point_contract_flag": "fast",
        "cpp.vec_isa_ok": True,
    }


def _tensors_to_inputs(traced: fx.GraphModule) -> None:
    """Make each tensor that a graph refers to an input, one for each tensor, however often it is
    used.
    """
    graph = traced.graph
    fake = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    assert fake is not None
    inputs: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = node.target
        if name not in inputs:
            with graph.inserting_before(next(iter(graph.nodes))):
                inputs[name] = graph.placeholder(name)
            # Compiled code outlives the model, and must not keep its weights.
            inputs[name].meta["val"] = fake.from_tensor(getattr(traced, name))
        node.replace_all_uses_with(inputs[name])
        graph.erase_node(node)


def _split_by_layer(traced: fx.GraphModule) -> fx.GraphModule:
    """Make a part of each run of consecutive nodes that are of the same layer, or of none."""
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    runs = itertools.groupby(calls, lambda node: node.meta.get("layer"))
    part_of: dict[fx.Node, int] = {}
    for number, (_, run) in enumerate(runs):
        for node in run:
            part_of[node] = number
    return split_module(traced, traced, part_of.__getitem__)


def _compile(part: fx.GraphModule, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile some consecutive nodes of a graph."""
    from torch._inductor.compile_fx import compile_fx  # loading it takes a second

    for node in part.graph.nodes:
        if not node.kwargs:
            node.target = _PRODUCTS.get(node.target, node.target)
    output = part.graph.output_node()
    is_single = not isinstance(output.args[0], tuple)
    if is_single:
        output.args = (output.args,)  # inductor knows tuples only
    part.recompile()
    examples = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
    code: Any = compile_fx(part, examples, config_patches=dict(options))

    def run(*inputs: Tensor) -> Any:
        outputs = code(*inputs)
        return outputs[0] if is_single else outputs

    return run


class _PlainTensors(TorchFunctionMode):
    """Shows operations the plain tensors in quantized weights: fake tensors know no subclasses."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def plain(weight: nn.Parameter) -> Tensor:
            return weight.as_subclass(Tensor)

        args, kwargs = tree_map_only(nn.Parameter, plain, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def _layers_marked(model: nn.Module) -> Iterator[None]:
    """Write the path of its layer into the metadata of each node that is traced.

    A layer is a numbered module that is in no other.
    """
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if not re.fullmatch(r"(\D+\.)?\d+", path):
                continue
            hooks.callback(module.register_forward_pre_hook(lambda *_: _mark(None)).remove)
            hooks.callback(module.register_forward_hook(lambda *_, path=path: _mark(path)).remove)
        yield


def end_part() -> None:
    """End a part of the call that is traced, if one is: equal parts are compiled once."""
    mode = get_proxy_mode()
    if mode is not None:
        _mark(f"part {len(mode.tracer.graph.nodes)}")


def _mark(layer: str | None) -> None:
    """Mark all nodes since the last call."""
    mode = get_proxy_mode()
    assert mode is not None
    for node in reversed(mode.tracer.graph.nodes):
        if "layer" in node.meta:
            break
        node.meta["layer"] = layer


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows [n, D] by a matrix [D, N] -> [n, N]; few rows on a CPU as sums, which inductor
    fuses.

    A library's product of few rows takes up to twice as long, and is a call between two kernels.
    """
    is_fast = rows.device.type == "cpu" and rows.dtype == torch.float32 and matrix.stride(0) == 1
    if not is_fast or len(rows) > _FEW_ROWS:
        return rows @ matrix
    # A view with given strides must be in memory, so that no sum computes it again.
    rows = rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))
    if matrix.numel() <= _CACHED:
        return (rows.unsqueeze(1) * matrix.t()).sum(-1)
    # A sum for each row reads a large matrix once: inductor computes sums over the same ranges in
    # one loop.
    return torch.stack([(matrix.t() * row).sum(-1) for row in rows])


def _biased_product(bias: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    return product(rows, matrix) + bias


_PRODUCTS = {torch.ops.aten.mm.default: product, torch.ops.aten.addmm.default: _biased_product}


def _signature(graph: fx.Graph) -> str:
    """Describe a graph: equal for graphs that compute the same from inputs of the same kinds."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            example = node.meta["val"]
            lines.append(f"{example.shape} {example.stride()} {example.dtype} {example.device}")
        else:
            arguments = map_arg((node.args, node.kwargs), numbers.__getitem__)
            lines.append(f"{node.op} {node.target} {arguments}")
        numbers[node] = f"%{len(numbers)}"
    return "\n".join(lines)
