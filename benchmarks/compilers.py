"""Our compiler for CPUs against `torch.compile`: compile time, time per pass, and time per answer.

    OMP_NUM_THREADS=1 python benchmarks/compilers.py [--prompts 15] [--tokens 64] [--rounds 25]
    OMP_NUM_THREADS=1 TMPDIR=$(mktemp -d) python benchmarks/compilers.py --only regions

Arms are compiled in one process and take turns; ratios are speeds, ours being 1. `--only NAME` compiles one arm and
ends: with an empty TMPDIR that is a cold compile, headers included, and a second time in the same one a warm compile.

- ours: `compile_call`.
- whole: `torch.compile` with `product` as a decomposition, as a user would call it.
- regions: the same without dynamo's guards, layers marked as `nested_compile_region`.
- direct: the same; what dynamo's graph was compiled to is then called on the same tensors without dynamo.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import common
import torch
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table

from harness.engines.protocol import Question, Request
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer, without_garbage_collection
from harness.local.decoding.inference import inference
from harness.local.engine.engine import LocalEngine
from harness.local.runners import compiled
from harness.local.runners.compiled import Call, CompiledCall, compile_call, product

_aten = torch.ops.aten
_numbers = itertools.count()


def main() -> None:
    made = common.parser(__doc__, prompts=15, tokens=64, draft_tokens=4, rounds=25)
    made.add_argument("--only", choices=ARMS, help="compile this arm and end")
    options = made.parse_args()
    settings = common.cpu_settings(
        options,
        f"decoding.max_new_tokens={options.tokens}",
        f"decoding.num_draft_tokens={options.draft_tokens}",
    )
    pair = common.load(settings)
    token_ids = common.read_prompts(settings, pair, options.prompts)
    preparation = Preparation(
        decoding=settings.decoding,
        runner="compiled",
        longest_prompt=max(map(len, token_ids)),
        say=print,
    )
    engines: dict[str, LocalEngine] = {}
    for name in [options.only] if options.only else ARMS:
        vars(compiled)["compile_call"] = ARMS[name]
        engines[name] = LocalEngine(common.load(settings), preparation)
        print(
            f"{name}: compiled in {engines[name].setup_seconds:.1f} s, load {os.getloadavg()[0]:.1f}"
        )
    if options.only:
        return
    rows = pass_rows(engines, options.rounds)
    questions = [
        Question([Request(ids, settings.decoding, seed=0, index=index)])
        for index, ids in enumerate(token_ids)
    ]
    for arm_index, arm_name in enumerate(("regular", "speculative")):
        contenders = {
            name: functools.partial(answer_seconds, engine, arm_index)
            for name, engine in engines.items()
        }
        rows += ratio_rows(f"answer, {arm_name}", common.take_turns(contenders, questions))
    common.show(
        f"{common.versions()}, load {os.getloadavg()[0]:.1f}",
        ["what", "arm", "speed by CPU time"],
        rows,
    )


def answer_seconds(engine: LocalEngine, arm_index: int, question: Question) -> float:
    """CPU seconds of an answer."""
    with without_garbage_collection():
        started = time.process_time()
        timed_answer(engine, engine.arms[arm_index], question)
        return time.process_time() - started


@inference
def pass_rows(engines: dict[str, LocalEngine], rounds: int) -> list[Sequence[object]]:
    """Time the compiled passes of both models, on the same cache; outputs must agree within 1e-5."""
    rows: list[Sequence[object]] = []
    for role in ("target", "draft"):
        runners: dict[str, Any] = {
            name: getattr(engine.runners, role) for name, engine in engines.items()
        }
        for width in runners["ours"]._passes:
            calls: dict[str, Callable[[], Sequence[Tensor]]] = {}
            outputs: dict[str, Tensor] = {}
            for name, runner in runners.items():
                generator = torch.Generator().manual_seed(0)
                for buffer in runner._compiled_slots.buffers:
                    buffer.copy_(torch.randn(buffer.shape, generator=generator))
                tokens = torch.arange(width).unsqueeze(0) + 7
                calls[name] = functools.partial(
                    in_packing, runner, runner._passes[width], tokens, torch.tensor([60])
                )
                outputs[name] = calls[name]()[0].clone()
                torch.testing.assert_close(outputs[name], outputs["ours"], rtol=0, atol=1e-5)
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name in random.sample(list(calls), len(calls)):
                    calls[name]()
                    seconds[name].append(common.timed(calls[name], clock=time.process_time))
            rows += ratio_rows(f"{role}, width {width}", seconds)
    return rows


def in_packing(runner: Any, call: CompiledCall, *inputs: Tensor) -> Sequence[Tensor]:
    """Make twenty passes, as `StaticRunner.extend` makes one."""
    for _ in range(20):
        with runner._forward.packing:
            outputs = call(*inputs)
    return outputs


def ratio_rows(what: str, seconds: dict[str, list[float]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for name in seconds:
        ratio = common.ratio(seconds["ours"], seconds[name])
        rows.append((what, name, f"{ratio.estimate:.3f} ({common.interval(ratio)})"))
    return rows


def whole(call: Call, model: nn.Module) -> Call:
    function, inputs = separated(call)
    compiled_function = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
    compiled_function(*inputs)
    return functools.partial(compiled_function, *inputs)


def regions(call: Call, model: nn.Module) -> Call:
    function, inputs = separated(call)

    def own(*tensors: Tensor) -> Any:
        return function(*tensors)

    # Without guards any width would match, so that each gets a code object.
    code = own.__code__.replace(co_name=f"own_{next(_numbers)}")
    own = types.FunctionType(code, globals(), closure=own.__closure__)
    optimize: Any = torch._dynamo.optimize(
        backend=backend,
        nopython=True,
        dynamic=False,
        guard_filter_fn=lambda guards: [False] * len(guards),
    )
    with layers_as_regions(model):
        compiled_function = optimize(own)
        compiled_function(*inputs)
    return functools.partial(compiled_function, *inputs)


def direct(call: Call, model: nn.Module) -> Call:
    function, inputs = separated(call)
    calls: list[Call] = []

    def keep(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        code = backend(graph, examples)

        def run(*tensors: Tensor) -> Any:
            calls.append(functools.partial(code, *tensors))
            return calls[-1]()

        return run

    with layers_as_regions(model):
        torch.compile(function, backend=keep, dynamic=False, fullgraph=True)(*inputs)
    return calls[0]


ARMS: dict[str, Callable[[Call, nn.Module], Call]] = {
    "ours": compile_call,
    "whole": whole,
    "regions": regions,
    "direct": direct,
}


def backend(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
    # As an argument, `decompositions` would keep inductor from caching graphs. The cache of dynamo's
    # graphs does not know of these functions.
    products = {_aten.mm.default: product, _aten.addmm.default: biased_product}
    with (
        mock.patch.dict(select_decomp_table(), products),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        return compile_fx(graph, examples, config_patches=compiled._OPTIONS)


def biased_product(
    bias: Tensor, rows: Tensor, matrix: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return alpha * product(rows, matrix) + beta * bias


def separated(call: Any) -> tuple[Callable[..., Any], tuple[Tensor, Tensor]]:
    """Take tokens and starts from a call of `SlotForward`."""
    *others, tokens, starts = call.args
    return functools.partial(call.func, *others), (tokens, starts)


@contextmanager
def layers_as_regions(model: nn.Module) -> Iterator[None]:
    """Mark the layers' forward, of which one graph is then compiled for all."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    forwards = {type(layer): type(layer).forward for layers in lists for layer in layers}
    for kind, forward in forwards.items():
        kind.forward = torch.compiler.nested_compile_region(forward)
    yield
    for kind, forward in forwards.items():
        kind.forward = forward


if __name__ == "__main__":
    main()
