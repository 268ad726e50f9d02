"""Compiles calls, which are functions of tensors with fixed shapes. Compiling fuses the many small kernels of norms and
rotary embeddings.

Equal layers are compiled once (`compile_call`): the graph of a forward pass is cut where a layer begins
and ends, and parts that compute the same share their code. PyTorch's recipes call this regional compilation, but
compile again for each layer's index.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.checks import last_line

# Products of up to this many rows are compiled as sums (`product`); larger ones are left to a library.
_FEW_ROWS = 8
# The largest matrix that stays in a core's cache: 512 KiB in float32.
_MOST_NUMBERS_IN_CACHE = 1 << 17

# Options of inductor, torch's compiler.
_OPTIONS = {
    # Sizes need no check, because the tensors are the same in every pass.
    "size_asserts": False,
    # Lets a multiplication and an addition become one instruction.
    "cpp.enable_floating_point_contract_flag": "fast",
    # Skips the test whether g++ knows the processor's vector instructions, which takes 3 s. If g++ does
    # not know them, the first kernel fails.
    "cpp.vec_isa_ok": True,
}

# The reasons for inductor's failures that are not its own faults, by the name of its error.
_REASONS = {
    "InvalidCxxCompiler": "this machine has no C++ compiler",
    "TritonMissing": "Triton is not installed",
}

# The classes of tensors that `make_fx` knows.
_HANDLED_TYPES: Any = proxy_tensor.HANDLED_TYPES

# Compiled parts by their signatures. Models of the same sizes share them, so the process keeps them
# until it ends. They hold code, but no weights.
_compiled: dict[str, Callable[..., Any]] = {}


class Part:
    """A function of tensors that can be compiled. Within a `compiling` block it is compiled for the shapes with which
    it is called. With other shapes it runs plainly.

    Args:
        function: its inputs are tensors or None. It must return new tensors, never an input, and may write to tensors
            that it is given or holds.
        models: the models whose layers it runs.
        key: returns a value on which the function depends, apart from the shapes of its inputs. There is one compiled
            version for each value.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        models: Sequence[nn.Module] = (),
        key: Callable[[], Hashable] = lambda: None,
    ) -> None:
        self.function = function
        self._key = key
        self._models = models
        self._versions: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *inputs: Tensor | None) -> Any:
        if get_proxy_mode() is not None:
            # A call that contains this part is being compiled, so the part is traced with it.
            with _layers_marked(self._models):
                return self.function(*inputs)
        # Compiled code assumes the layout of its inputs without checking it, so the layout is part of the key.
        layouts = [each if each is None else (each.shape, each.stride()) for each in inputs]
        key = (self._key(), *layouts)
        version = self._versions.get(key)
        if version is None:
            version = self.function
            if _compilers:
                version = _compilers[-1](self, inputs)
                self._versions[key] = version
        return version(*inputs)


# Returns a compiled version of a part for its inputs.
Compiler = Callable[[Part, Sequence[Tensor | None]], Callable[..., Any]]

# The compilers of the open `compiling` blocks, the innermost last.
_compilers: list[Compiler] = []


@contextmanager
def compiling(refused: Callable[[UnsupportedModelError], None] | None = None) -> Iterator[None]:
    """Within this block, every part is compiled for the inputs with which it is called.

    Args:
        refused: called with the reason if a part cannot be compiled. The part then runs plainly.

    Raises:
        UnsupportedModelError: a part cannot be compiled, and there is no `refused`.
    """

    def compiled(part: Part, inputs: Sequence[Tensor | None]) -> Callable[..., Any]:
        try:
            return compile_call(part, inputs)
        except UnsupportedModelError as reason:
            if refused is None:
                raise
            refused(reason)
            return part.function

    _compilers.append(compiled)
    try:
        yield
    finally:
        _compilers.pop()


def compile_call(call: Callable[..., Any], inputs: Sequence[Tensor | None]) -> Callable[..., Any]:
    """Compile a call, which may contain parts. Returns a function of tensors with the shapes of `inputs`. It uses the
    same weights and other tensors as the call does now, every time.

    The result neither looks these tensors up again nor checks them, which would take a tenth of a
    small model's pass.

    For the tiny pair `torch.compile`, without guards and with layers as `nested_compile_region`, reaches about 0.9 of
    this speed, but dynamo traces every layer of every pass: it compiles in 29 s instead of 20, with warm caches in 12 s
    instead of 4 (benchmarks/RESULTS.md). On a GPU it took half a minute for each width of a 7B model. In return, a pass
    here has one more kernel for each layer, whose last sum is not fused with the next layer's norm.

    Raises UnsupportedModelError if the call reads the values of tensors, which do not exist while it is traced, or if
    inductor fails.
    """
    structure: Any = None  # the structure of the outputs, known once the call has been traced

    def flat(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        nonlocal structure
        outputs, structure = tree_flatten(call(*tensors))
        return tuple(outputs)

    # `make_fx` refuses subclasses of Parameter, such as bitsandbytes' weights in 4 bit, which are tensors with further
    # fields.
    proxy_tensor.HANDLED_TYPES = (*_HANDLED_TYPES, *nn.Parameter.__subclasses__())
    # Traced before dispatch, a product is one operation instead of four, which makes tracing a third shorter.
    tracer = make_fx(flat, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
    try:
        traced = tracer(*inputs)
    except Exception as error:
        reason = f"cannot be compiled: torch cannot trace its code ({last_line(error)})"
        raise UnsupportedModelError(reason) from error
    _tensors_to_inputs(traced)
    whole = _split_by_layer(traced)
    for node in whole.graph.find_nodes(op="call_module"):
        part = whole.get_submodule(node.target)
        assert isinstance(part, fx.GraphModule)
        signature = _signature(part.graph)
        if signature not in _compiled:
            _compiled[signature] = _compile(part)
        node.op = "call_function"
        node.target = _compiled[signature]
    whole.recompile()
    # `_tensors_to_inputs` has named each further placeholder after the attribute with its tensor.
    placeholders = traced.graph.find_nodes(op="placeholder")
    num_held = len(placeholders) - len(inputs)
    tensors = [getattr(traced, node.target) for node in placeholders[:num_held]]

    def compiled(*given: Tensor) -> Any:
        return tree_unflatten(whole.forward(*tensors, *given), structure)

    return compiled


def _tensors_to_inputs(traced: fx.GraphModule) -> None:
    """Turn the tensors that a graph refers to into inputs, one for each tensor. Changes the graph in place."""
    graph = traced.graph
    fake = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    assert fake is not None
    inputs: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = node.target
        if name not in inputs:
            with graph.inserting_before(next(iter(graph.nodes))):
                inputs[name] = graph.placeholder(name)
            # A fake tensor, because compiled code outlives the model, and must not keep the model's weights.
            inputs[name].meta["val"] = fake.from_tensor(getattr(traced, name))
        node.replace_all_uses_with(inputs[name])
        graph.erase_node(node)


def _split_by_layer(traced: fx.GraphModule) -> fx.GraphModule:
    """Split a graph into parts, each of which is a run of consecutive nodes with the same mark (`_mark`)."""
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    runs = itertools.groupby(calls, lambda node: node.meta.get("layer"))
    part_of: dict[fx.Node, int] = {}
    for number, (_, run) in enumerate(runs):
        for node in run:
            part_of[node] = number
    return split_module(traced, traced, part_of.__getitem__)


def _compile(part: fx.GraphModule) -> Callable[..., Any]:
    """Compile a part of a graph."""
    from torch._inductor.compile_fx import compile_fx  # loading it takes a second

    # Products are replaced by Python functions, which inductor traces. A product with factors (addmm's
    # alpha and beta, which are keywords) is not replaced.
    products = [node for node in part.graph.nodes if node.target in _PRODUCTS and not node.kwargs]
    for node in products:
        node.target = _PRODUCTS[node.target]
    output = part.graph.output_node()
    is_single = not isinstance(output.args[0], tuple)
    if is_single:
        output.args = (output.args,)  # inductor accepts only a tuple of outputs
    part.recompile()
    examples = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
    try:
        code: Any = compile_fx(part, examples, config_patches=_OPTIONS)
    except Exception as error:
        kind = type(getattr(error, "inner_exception", error)).__name__
        reason = _REASONS.get(kind, f"torch's compiler failed ({kind})")
        raise UnsupportedModelError(f"cannot be compiled: {reason}") from error

    def run(*inputs: Tensor) -> Any:
        outputs = code(*inputs)
        return outputs[0] if is_single else outputs

    return run


@contextmanager
def _layers_marked(models: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block, mark each traced node with the path of its layer, such as `model.layers.3`, or with None if it
    belongs to no layer.

    A layer is the outermost module whose name is a number. A path with a digit before this number, as
    in `tower2.layers.0`, is not recognised, and its layers are compiled as one part.

    Nodes are marked after they have been traced. When a layer begins, the nodes since the last mark belong to no layer.
    When it ends, the nodes since its beginning belong to it.
    """
    with ExitStack() as hooks:
        for path, module in itertools.chain(*(model.named_modules() for model in models)):
            if not re.fullmatch(r"(\D+\.)?\d+", path):
                continue
            hooks.callback(module.register_forward_pre_hook(lambda *_: _mark(None)).remove)
            hooks.callback(module.register_forward_hook(lambda *_, path=path: _mark(path)).remove)
        yield


def end_part() -> None:
    """End a part of the call that is being traced. Equal parts are compiled once.

    A drafter that drafts token by token calls this after each token, so that its K equal steps are K parts with the
    same code. Does nothing if no call is being traced.
    """
    mode = get_proxy_mode()
    if mode is not None:
        _mark(f"part {len(mode.tracer.graph.nodes)}")


def _mark(layer: str | None) -> None:
    """Mark all nodes that have been traced since the last call."""
    mode = get_proxy_mode()
    assert mode is not None
    for node in reversed(mode.tracer.graph.nodes):
        if "layer" in node.meta:
            break
        node.meta["layer"] = layer


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows [n, D] by a matrix [D, N]. Returns [n, N].

    On a CPU in float32, up to `_FEW_ROWS` rows are multiplied as sums, which inductor fuses with the next operations. A
    library's product of few rows takes up to twice as long, and cannot be fused.
    """
    is_transposed_weight = matrix.stride(0) == 1
    suits_sums = rows.dtype == torch.float32 and rows.is_cpu and is_transposed_weight
    if not suits_sums or len(rows) > _FEW_ROWS:
        return rows @ matrix
    # as_strided makes inductor store the rows. Otherwise each sum would compute them again.
    rows = rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))
    if matrix.numel() <= _MOST_NUMBERS_IN_CACHE:
        return (rows.unsqueeze(1) * matrix.t()).sum(-1)
    # With one sum per row a large matrix is read only once, because inductor computes sums over the same ranges in
    # one loop.
    return torch.stack([(matrix.t() * row).sum(-1) for row in rows])


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = product(states.flatten(0, -2), weight.t()).view(*states.shape[:-1], -1)
    return rows if bias is None else rows + bias


def _biased_product(bias: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    return product(rows, matrix) + bias


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.linear.default: _linear,
    _aten.addmm.default: _biased_product,
}


def _signature(graph: fx.Graph) -> str:
    """Return a text that is equal for graphs with the same operations, shapes, strides, types and devices."""
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
