"""Compiles calls: functions of tensors with fixed shapes. Compiling fuses the many small kernels of norms and rotary
embeddings.

Equal layers are compiled only once (`compile_call`): the graph of a forward pass is cut at the beginning and the end of
each layer, and parts that compute the same share their code. PyTorch's recipes for regional compilation do the same,
but compile the code again for the index of each layer.
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.checks import last_line

# Products of up to this many rows are compiled as sums (`product`). A library computes products of more rows.
_FEW_ROWS = 8
# The largest matrix that stays in a core's cache: 512 KiB in float32.
_MOST_NUMBERS_IN_CACHE = 1 << 17

# Options of inductor, torch's compiler.
_OPTIONS = {
    # Sizes are not checked, because the tensors are the same in every pass.
    "size_asserts": False,
    # A multiplication and an addition may become one instruction.
    "cpp.enable_floating_point_contract_flag": "fast",
    # Skip the test whether g++ knows the processor's vector instructions. The test takes 3 s. If g++ does not know
    # them, compiling the first kernel fails.
    "cpp.vec_isa_ok": True,
}

# Reasons for failures that are not inductor's fault, by the class name of the error.
_REASONS = {
    "InvalidCxxCompiler": "this machine has no C++ compiler",
    "TritonMissing": "Triton is not installed",
}

# The classes of tensors that `make_fx` accepts.
_HANDLED_TYPES: Any = proxy_tensor.HANDLED_TYPES

# Compiled parts by their signatures. They are kept until the process ends, because later models of the same sizes use
# them too. They contain code, but no weights.
_compiled: dict[str, Callable[..., Any]] = {}


class Part:
    """A function of tensors that can be compiled. In a `compiling` block, it is compiled for the shapes and strides of
    the inputs with which it is called. Later calls with such inputs, and with an equal `key`, run the compiled version.
    Outside such a block, a call without a compiled version runs the function itself.

    Args:
        function: its inputs are tensors or None. It must return new tensors, and never an input. It may write to its
            inputs, and to other tensors that it refers to.
        models: the models whose layers the function runs.
        key: returns a value on which the function's code depends, in addition to the shapes of its inputs. Each value
            has its own compiled version.
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
        # While `make_fx` traces a call, torch has a proxy mode.
        if get_proxy_mode() is not None:
            # The call contains this part. So the part is traced as a piece of that call, even in a `compiling` block.
            with _layers_marked(self._models):
                return self.function(*inputs)
        # Compiled code relies on the memory layout of its inputs without checking it. So the layout is part of the key.
        layouts = [each if each is None else (each.shape, each.stride()) for each in inputs]
        key = (self._key(), *layouts)
        version = self._versions.get(key)
        if version is None:
            version = self.function
            # There is a compiler only in a `compiling` block.
            if _compilers:
                # Tracing calls this part again, which then runs its function (above).
                version = _compilers[-1](self, inputs)
                self._versions[key] = version
        return version(*inputs)


# A function that returns a compiled version of a part, for inputs with these shapes.
Compiler = Callable[[Part, Sequence[Tensor | None]], Callable[..., Any]]

# The compilers of the `compiling` blocks that are being executed, the innermost block last.
_compilers: list[Compiler] = []


@contextmanager
def compiling(refused: Callable[[UnsupportedModelError], None] | None = None) -> Iterator[None]:
    """While the block is executed, each part is compiled for the inputs with which it is called.

    Args:
        refused: called with the reason if a part cannot be compiled. The part then runs without being compiled.

    Raises:
        UnsupportedModelError: a part cannot be compiled, and `refused` is None.
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
    """Compile a call, which may contain parts. Returns a function of tensors with the shapes of `inputs`.

    The weights and other tensors that the call refers to are fixed when it is compiled. Replacing such a tensor later
    has no effect; writing into it does. They are not looked up or checked again, because that would take a tenth of the
    time of a small model's pass.

    `torch.compile` is slower. Measured with the tiny pair, without guards and with layers as `nested_compile_region`
    (benchmarks/RESULTS.md):

                                 this function    torch.compile
        speed of a pass          1                about 0.9
        compiling                20 s             29 s
        ... with warm caches     4 s              12 s

    `torch.compile` takes longer because dynamo traces every layer of every pass. On a GPU, it took half a minute for
    each width of a 7B model. The price of compiling each layer separately is one additional kernel per layer: the last
    sum of a layer is not fused with the norm of the next layer.

    Raises:
        UnsupportedModelError: the call reads values of tensors, which do not exist while it is traced; or inductor
            fails.
    """
    # The structure of the outputs. It is known when the call has been traced.
    structure: Any = None

    def flat(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        nonlocal structure
        outputs, structure = tree_flatten(call(*tensors))
        return tuple(outputs)

    # By default, `make_fx` refuses subclasses of Parameter, such as bitsandbytes' 4-bit weights. They are ordinary
    # tensors with further fields.
    proxy_tensor.HANDLED_TYPES = (*_HANDLED_TYPES, *nn.Parameter.__subclasses__())
    # With `pre_dispatch`, a product is traced as one operation instead of four. Tracing then takes a third less time.
    tracer = make_fx(flat, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
    try:
        traced = tracer(*inputs)
    except Exception as error:
        reason = f"cannot be compiled: torch cannot trace its code ({last_line(error)})"
        raise UnsupportedModelError(reason) from error
    _tensors_to_inputs(traced)
    # In the divided graph, each node calls one part, which is a submodule. Compiled functions replace these submodules.
    whole = _split_by_layer(traced)
    for node in whole.graph.find_nodes(op="call_module"):
        part = whole.get_submodule(node.target)
        assert isinstance(part, fx.GraphModule)
        # All operations of a part have the same GPUs, which `_split_by_layer` has noted. The one before the output node
        # is the part's last.
        if len(part.graph.output_node().prev.meta["gpus"]) > 1:
            # Copies between GPUs are not compiled.
            continue
        signature = _signature(part.graph)
        if signature not in _compiled:
            _compiled[signature] = _compile(part)
        node.op = "call_function"
        node.target = _compiled[signature]
    whole.recompile()
    # `_tensors_to_inputs` has added placeholders before those of `inputs`. The name of each added placeholder is the
    # name of the attribute that holds its tensor.
    placeholders = traced.graph.find_nodes(op="placeholder")
    num_held = len(placeholders) - len(inputs)
    tensors = [getattr(traced, node.target) for node in placeholders[:num_held]]

    def compiled(*given: Tensor) -> Any:
        return tree_unflatten(whole.forward(*tensors, *given), structure)

    return compiled


def _tensors_to_inputs(traced: fx.GraphModule) -> None:
    """Turn the tensors to which a graph refers into inputs of the graph, one input per tensor. This changes the graph
    in place.
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
            # The example is a fake tensor, because compiled code is kept longer than the model, and must not keep the
            # model's weights in memory.
            inputs[name].meta["val"] = fake.from_tensor(getattr(traced, name))
        node.replace_all_uses_with(inputs[name])
        graph.erase_node(node)


def _split_by_layer(traced: fx.GraphModule) -> fx.GraphModule:
    """Split a graph into parts. Each part consists of consecutive nodes that have the same mark (`_mark`), and are on
    the same GPU. Copies between devices are parts of their own.

    Nodes with the marks None, a, a, None, b become four parts: [None], [a, a], [None] and [b].
    """
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    gpus: list[torch.device] = []
    for node in calls:
        # Operations without tensors, such as the beginning of `torch.no_grad`, begin no part.
        gpus = node.meta["gpus"] = _gpus(node) or gpus
    runs = itertools.groupby(calls, lambda node: (node.meta.get("layer"), node.meta["gpus"]))
    part_of: dict[fx.Node, int] = {}
    for number, (_, run) in enumerate(runs):
        for node in run:
            part_of[node] = number
    # `split_module` calls the function for each node, and returns a graph with one node for each number.
    return split_module(traced, traced, part_of.__getitem__)


def _gpus(node: fx.Node) -> list[torch.device]:
    """Return the GPUs of a node's output and inputs: one for a kernel, two for a copy between GPUs, none on a CPU."""
    values = tree_leaves([each.meta.get("val") for each in (node, *node.all_input_nodes)])
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_cuda]
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def _compile(part: fx.GraphModule) -> Callable[..., Any]:
    """Compile a part of a graph. Raises UnsupportedModelError if inductor fails."""
    # Imported here, because this import takes a second.
    from torch._inductor.compile_fx import compile_fx

    # Products are replaced by Python functions, which inductor traces. A product with factors (the keyword arguments
    # alpha and beta of addmm) is not replaced.
    products = [node for node in part.graph.nodes if node.target in _PRODUCTS and not node.kwargs]
    for node in products:
        node.target = _PRODUCTS[node.target]
    output = part.graph.output_node()
    gpus = output.prev.meta["gpus"]
    is_single = not isinstance(output.args[0], tuple)
    if is_single:
        # inductor accepts only a tuple of outputs.
        output.args = (output.args,)
    part.recompile()
    examples = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
    try:
        code: Any = compile_fx(part, examples, config_patches=_OPTIONS)
    except Exception as error:
        kind = type(getattr(error, "inner_exception", error)).__name__
        reason = _REASONS.get(kind, f"torch's compiler failed ({kind})")
        raise UnsupportedModelError(f"cannot be compiled: {reason}") from error

    def run(*inputs: Tensor) -> Any:
        for gpu in gpus:
            # This does nothing, but tells `Graphs` which GPU executes the kernels.
            torch.empty(0, device=gpu)
        outputs = code(*inputs)
        return outputs[0] if is_single else outputs

    return run


@contextmanager
def _layers_marked(models: Sequence[nn.Module]) -> Iterator[None]:
    """While the block is executed, mark each traced node with the path of its layer, such as `model.layers.3`, or with
    None if it belongs to no layer.

    A layer is the outermost module whose name is a number. If its path has a digit before this number, as in
    `tower2.layers.0`, the layer is not recognised. Layers that are not recognised are compiled together, as one part.

    Nodes are marked after they have been traced. When a layer begins, the nodes since the last mark belong to no layer.
    When the layer ends, the nodes since its beginning belong to it.
    """
    with ExitStack() as hooks:
        for path, module in itertools.chain(*(model.named_modules() for model in models)):
            if not re.fullmatch(r"(\D+\.)?\d+", path):
                continue
            hooks.callback(module.register_forward_pre_hook(lambda *_: _mark(None)).remove)
            hooks.callback(module.register_forward_hook(lambda *_, path=path: _mark(path)).remove)
        yield


def end_part() -> None:
    """End a part of the call that is being traced. Equal parts are compiled only once.

    A drafter that drafts token by token calls this after each token. So its K equal steps become K parts with the same
    code. If no call is being traced, this does nothing.
    """
    mode = get_proxy_mode()
    if mode is not None:
        # The number makes the mark different from that of the part before. Equal marks would join the two parts.
        _mark(f"part {len(mode.tracer.graph.nodes)}")


def _mark(layer: str | None) -> None:
    """Mark all nodes that have been traced since the last call of this function."""
    mode = get_proxy_mode()
    assert mode is not None
    for node in reversed(mode.tracer.graph.nodes):
        if "layer" in node.meta:
            break
        node.meta["layer"] = layer


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows [n, D] by a matrix [D, N]. Returns [n, N].

    On a CPU in float32, products of up to `_FEW_ROWS` rows with a transposed weight are computed as sums, which
    inductor fuses with the next operations. A library's product of few rows takes up to twice as long, and cannot be
    fused. (Measured: with sums, a pass of the tiny model takes 0.6 to 0.7 of the time.)
    """
    is_transposed_weight = matrix.stride(0) == 1
    suits_sums = rows.dtype == torch.float32 and rows.is_cpu and is_transposed_weight
    if not suits_sums or len(rows) > _FEW_ROWS:
        return rows @ matrix
    # `as_strided` makes inductor store the rows in memory. Without it, each sum would compute them again.
    rows = rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))
    if matrix.numel() <= _MOST_NUMBERS_IN_CACHE:
        return (rows.unsqueeze(1) * matrix.t()).sum(-1)
    # For a large matrix there is one sum per row. inductor computes sums over the same ranges in one loop, so that the
    # matrix is read only once.
    return torch.stack([(matrix.t() * row).sum(-1) for row in rows])


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = product(states.flatten(0, -2), weight.t()).view(*states.shape[:-1], -1)
    return rows if bias is None else rows + bias


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.linear.default: _linear,
    _aten.addmm.default: lambda bias, rows, matrix: product(rows, matrix) + bias,
}


def _signature(graph: fx.Graph) -> str:
    """Return a text that is equal for graphs with equal operations, shapes, strides, dtypes and devices."""
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
