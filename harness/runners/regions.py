"""A model's forward pass compiled for given tensors, equal layers once.

The graph of a forward pass is cut where a layer begins and ends, and parts that compute the same share their code: the
regional compilation of PyTorch's recipes, without a new compilation for each layer's index.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module

from harness.runners.graphs import Call

# A product of more rows than this is a library's.
_FEW_ROWS = 8


class _Part(nn.Module):
    """Some consecutive nodes of a graph, compiled."""

    def __init__(self, part: fx.GraphModule, options: Mapping[str, Any]) -> None:
        super().__init__()
        from torch._inductor.compile_fx import compile_fx  # loading it takes a second

        output = part.graph.output_node()
        self._is_single = not isinstance(output.args[0], tuple)
        if self._is_single:
            output.args = (output.args,)  # inductor knows tuples only
            part.recompile()
        examples = [node.meta["example_value"] for node in part.graph.find_nodes(op="placeholder")]
        self._compiled: Any = compile_fx(part, examples, config_patches=dict(options))

    def forward(self, *inputs: Any) -> Any:
        outputs = self._compiled(*inputs)
        return outputs[0] if self._is_single else outputs


def compile_call(call: Call, options: Mapping[str, Any]) -> Call:
    """Compile a call, with options of inductor: a pass over the same tensors every time.

    The result neither looks for the tensors again nor checks them, which takes a tenth of a small model's pass. What
    the call returns must be computed by it, in that order.
    """
    torch.compile(_run, backend=compile_layers_once, dynamic=False, fullgraph=True, options=dict(options))(call)
    return _latest.pop()


# The pass that compiled code has just made: dynamo finds the code, made now or before, and the tensors.
_latest: list[Call] = []


def _run(call: Call) -> tuple[Tensor, ...]:
    return call()


def compile_layers_once(
    graph: fx.GraphModule, examples: Sequence[Tensor], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """A backend of `torch.compile`."""
    for node in graph.graph.find_nodes(op="call_function", target=nn.functional.linear):
        node.target = linear
    runs = itertools.groupby((node for node in graph.graph.nodes if node.op.startswith("call")), _layer)
    number = {node: index for index, (_, run) in enumerate(runs) for node in run}
    whole = split_module(graph, graph, number.__getitem__)
    compiled: dict[str, _Part] = {}
    for name, part in list(whole.named_children()):
        assert isinstance(part, fx.GraphModule)
        signature = _signature(part.graph)
        if signature not in compiled:
            compiled[signature] = _Part(part, options)
        whole.set_submodule(name, compiled[signature])

    def run(*tensors: Tensor) -> Any:
        _latest[:] = [functools.partial(whole.forward, *tensors)]
        return _latest[0]()

    return run


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear`; few rows on a CPU as sums, which inductor puts into one kernel with what surrounds them.

    A library's product of few rows takes up to twice as long, and each is a call between two kernels.
    """
    rows = states.reshape(-1, states.shape[-1])
    if states.device.type != "cpu" or states.dtype != torch.float32 or len(rows) > _FEW_ROWS:
        return nn.functional.linear(states, weight, bias)
    # A view with given strides must be in memory, so that no sum computes it again. One sum per row reads the weights
    # once: inductor computes sums over the same ranges in one loop.
    rows = rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))
    products = torch.stack([(weight * row).sum(-1) for row in rows])
    return (products if bias is None else products + bias).view(*states.shape[:-1], -1)


def _layer(node: fx.Node) -> str | None:
    """The path of the layer that a node belongs to: the outermost module that is a numbered one of several."""
    paths = (path for path, _ in node.meta.get("nn_module_stack", {}).values())
    return next((path for path in paths if re.search(r"\.\d+$", path)), None)


def _signature(graph: fx.Graph) -> str:
    """Equal for graphs that compute the same from inputs of the same kinds."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            example = node.meta["example_value"]
            lines.append(f"{example.shape} {example.stride()} {example.dtype} {example.device}")
        else:
            lines.append(f"{node.op} {node.target} {map_arg((node.args, node.kwargs), numbers.__getitem__)}")
        numbers[node] = f"%{len(numbers)}"
    return "\n".join(lines)
