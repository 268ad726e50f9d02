"""Prepared runners. On a CPU nothing is captured, but graphs' buffers are written and read there, too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.backends.cuda import cudnn_sdp_enabled
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from architectures import PROMPTS, SERVED, random_model
from harness.config.amounts import BUCKET
from harness.local.decoding.batch import Request
from harness.local.decoding.loops import autoregressive, speculative
from harness.local.decoding.protocols import Runner
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.runners import attention, compiled, regions
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.eager import EagerRunner
from harness.local.runners.graphs import GraphRecorder
from harness.local.runners.prepared_calls import RunnerShapes
from harness.local.runners.regions import product
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.static import StaticRunner
from prepared_pairs import NUM_DRAFT_TOKENS, WARP, pair, prepared
from traced import run_as_traced


def request(
    length: int = 20, prompts: list[list[int]] = PROMPTS, device: str = "cpu", stop: int = 50
) -> Request:
    """Rows end at different times: at a stop token, or at the length limit after different numbers of iterations."""
    return Request(
        prompts,
        uniforms(0, range(len(prompts)), length + 1, device),
        WARP,
        length,
        frozenset({stop}),
    )


def written(
    target: Runner, draft: Runner, what: Request, num_draft_tokens: int = NUM_DRAFT_TOKENS
) -> list[object]:
    """All that both decoders decide."""
    drafter = ModelDrafter(draft, WARP, what.uniforms.device)
    records = [*autoregressive(target, what), *speculative(target, drafter, what, num_draft_tokens)]
    return [
        (record.rows, record.tokens, record.proposed, record.num_accepted) for record in records
    ]


@pytest.mark.parametrize("name", SERVED)
def test_prepared_shapes_give_the_eager_tokens(name: str) -> None:
    target, draft = pair(name)
    fast = prepared(target), prepared(draft, num_drawn=NUM_DRAFT_TOKENS)
    for length in (1, 2, 20):
        assert written(*fast, request(length)) == written(
            EagerRunner(target), EagerRunner(draft), request(length)
        )


def test_every_step_runs_a_prepared_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair("llama")
    fast = prepared(target), prepared(draft, num_drawn=NUM_DRAFT_TOKENS)
    eager: list[Tensor] = []
    monkeypatch.setattr(StaticRunner, "extend", lambda self, tokens: eager.append(tokens))
    what = request()
    for first in (0, 1, 2):  # whole and smaller batches
        written(*fast, Request(PROMPTS[first:], what.uniforms[first:], WARP, 20, what.stop_tokens))
    assert not eager


def test_a_batch_that_fits_no_prepared_shape_still_runs() -> None:
    target, draft = pair("llama")
    fast, eager = (
        (prepared(target), prepared(draft, num_drawn=2)),
        (EagerRunner(target), EagerRunner(draft)),
    )
    more_rows = request(10, [*PROMPTS, [7, 8, 9]])
    assert written(*fast, more_rows) == written(*eager, more_rows)
    longer = request(5, [list(range(3, 90)) * 2, *PROMPTS[:2]])
    assert written(*fast, longer) == written(*eager, longer)
    overflowing = request(40, [[7] * (BUCKET - 20), *PROMPTS[:2]], stop=-1)
    assert written(*fast, overflowing) == written(*eager, overflowing)


def test_another_warp_is_not_the_prepared_one() -> None:
    model = random_model("llama")
    fast, eager = prepared(model, num_drawn=2), EagerRunner(model)
    greedy, tokens, numbers = Warp(0), torch.tensor([[7], [8], [9]]), torch.full((3, 2), 0.5)
    fast.start(PROMPTS)
    eager.start(PROMPTS)
    drawn, probabilities = fast.draw(tokens, numbers, greedy)
    assert drawn[:, 0].tolist() == eager.extend(tokens).logits[:, -1].argmax(-1).tolist()
    assert set(probabilities.unique().tolist()) == {0.0, 1.0}


def test_tokens_that_fill_up_a_shape_stay_within_the_context() -> None:
    """GPT-2 has as many positions as its context has tokens."""
    model = random_model("gpt2", n_positions=16)
    what = request(5, [PROMPTS[2]], stop=-1)  # 11 + 5 = 16
    fast = prepared(model, 1), prepared(model, 1, NUM_DRAFT_TOKENS)
    eager = [record.tokens for record in autoregressive(EagerRunner(model), what)]
    assert [record.tokens for record in autoregressive(fast[0], what)] == eager
    assert written(*fast, what) == written(EagerRunner(model), EagerRunner(model), what)


def test_8_bit_is_refused() -> None:
    model = random_model("llama")
    model.is_loaded_in_8bit = True
    with pytest.raises(UnsupportedModelError, match="8 bit"):
        PreparedRunner(model, compiled=True, captured=False)


@pytest.mark.slow
def test_compiled_shapes_give_the_eager_tokens() -> None:
    """Regular steps, of one width: decoders of several widths run parts as they were traced, in other tests."""
    model = random_model("llama", num_hidden_layers=1)
    fast = PreparedRunner(model, compiled=True, captured=False)
    fast.prepare(RunnerShapes(1, 60, [1]))
    assert fast.setup_seconds > 0
    compilations = dict(counters["inductor"])
    what = request(20, PROMPTS[:1])
    eager = [record.tokens for record in autoregressive(EagerRunner(model), what)]
    assert [record.tokens for record in autoregressive(fast, what)] == eager
    assert counters["inductor"] == compilations, "all compilations belong in `prepare`"


def test_equal_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = run_as_traced(monkeypatch)
    for widened, expected in ((False, 3), (True, 1)):
        model = random_model("llama")
        if widened:
            model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5
        parts.clear()
        for _ in range(2):  # the second one finds what the first one compiled
            PreparedRunner(model, compiled=True, captured=False, hidden_layers=(1, 2)).prepare(
                RunnerShapes(2, 60, [1])
            )
        assert len(parts) == expected, (
            "before the layers, one for each kind of layer, and after them; models share them"
        )
        nodes = [node for part in parts for node in part.graph.nodes]
        written = [
            node.args[0] for node in nodes if node.target is torch.ops.aten.index_put_.default
        ]
        assert len(written) == 2
        assert all(buffer.op == "placeholder" for buffer in written), (
            "inductor copies the whole base of a view"
        )


def traced_mlp(num_rows: int) -> GraphModule:
    """A gated layer: three products, the last of what an activation was computed for."""
    shapes = [(num_rows, 8), (8, 12), (8, 12), (12, 8)]

    def mlp(states: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch.nn.functional.silu(states @ gate) * (states @ up) @ down

    return make_fx(mlp, tracing_mode="fake")(*map(torch.randn, shapes))


def test_an_activation_is_not_computed_again_for_each_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, where a product of one row is fused with what comes before it."""
    part = traced_mlp(1)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda part, *_, **__: part)
    regions._compile(part, {})
    names = [getattr(node.target, "__name__", "") for node in part.graph.nodes]
    products = [name for name in names if "product" in name]
    assert products == ["product", "product", "_product_of_activated"]


def test_only_parts_with_products_of_one_row_are_tuned() -> None:
    gpu = torch.device("cuda")
    without = make_fx(torch.sin, tracing_mode="fake")(torch.randn(1, 8))
    asked = [(traced_mlp(1), gpu), (traced_mlp(5), gpu), (without, gpu), (traced_mlp(1), "cpu")]
    tuned = [
        regions._options(part, torch.device(device))["coordinate_descent_tuning"]
        for part, device in asked
    ]
    assert tuned == [True, False, False, False]


@pytest.mark.parametrize(("num_rows", "cached"), [(1, 0), (5, 0), (5, 24), (60, 24)])
def test_products_of_few_rows_are_sums(
    num_rows: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.local.runners.regions._MOST_NUMBERS_IN_CACHE", cached)
    rows, weight = torch.randn(num_rows, 16)[:, 4:12], torch.randn(3, 8)
    with FlopCounterMode(display=False) as counted:
        result = product(rows, weight.t())
    assert counted.get_total_flops() == (0 if num_rows < 60 else 2 * 60 * 8 * 3), (
        "multiplied by a library"
    )
    assert torch.allclose(result, rows @ weight.t(), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("dtype", "compiled"), [(torch.float32, False), (torch.bfloat16, True)])
def test_captured_graphs_give_the_eager_tokens(dtype: torch.dtype, compiled: bool) -> None:
    if compiled and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    target, draft = pair("llama", "cuda:0", dtype)
    fast = (
        prepared(target, compiled=compiled),
        prepared(draft, num_drawn=NUM_DRAFT_TOKENS, compiled=compiled),
    )
    assert all(runner.setup_seconds > 0 for runner in fast)
    what = request(device="cuda:0")
    ours = written(*fast, what)
    if dtype == torch.float32:
        assert ours == written(EagerRunner(target), EagerRunner(draft), what)
    logits = []
    for runner in (fast[0], EagerRunner(target)):
        runner.start(PROMPTS)
        tokens = torch.full((3, NUM_DRAFT_TOKENS + 1), 7, device="cuda:0")
        logits.append(runner.extend(tokens).logits)
        # Outputs of a graph outlive its next replay.
        before = logits[-1].clone()
        runner.extend(tokens + 1)
        assert torch.equal(logits[-1], before)
    logits = [one.float() for one in logits]
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < (
        1e-4 if dtype == torch.float32 else 0.05
    )


@pytest.mark.gpu
def test_a_compiled_pass_copies_no_cache() -> None:
    runner = PreparedRunner(random_model("llama").to("cuda:0"), compiled=True, captured=False)
    runner.prepare(RunnerShapes(1, 2**20, [2]))
    runner.start(PROMPTS[:1])
    tokens = torch.full((1, 2), 7, device="cuda:0")
    runner.extend(tokens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.extend(tokens)
    one_layers_keys = runner._slots.buffers[0].nbytes
    assert torch.cuda.max_memory_allocated() - before < one_layers_keys


@pytest.mark.gpu
@pytest.mark.usefixtures("gpus")
def test_a_model_that_waits_for_the_device_cannot_be_captured() -> None:
    model = random_model("llama").cuda()
    norm = model.model.norm
    original = norm.forward
    norm.forward = lambda states: original(states) * (1 if states.sum().item() else 2)
    with pytest.raises(UnsupportedModelError, match="cannot be captured: "):
        prepared(model)
    assert not GraphRecorder.has_failed
    torch.rand(1, device="cuda:0")  # which a failed capture leaves broken


@pytest.mark.gpu
def test_a_shape_without_a_plan_of_cudnn_is_captured_with_another_kernel(gpus: Any) -> None:
    if gpus is None:
        pytest.skip("real GPUs have plans for these shapes")
    gpus.has_no_plan = True
    runner = prepared(random_model("llama").cuda())
    runner.start(PROMPTS)
    assert runner.extend(torch.full((3, 1), 7, device="cuda:0")).logits.shape[1] == 1
    assert not gpus.plans


@pytest.mark.gpu
@pytest.mark.parametrize("is_slower", [False, True])
def test_the_faster_attention_kernel_is_captured(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, is_slower: bool
) -> None:
    """By replays over the run's own slots, with cuDNN's kernel and without it in turns."""
    if gpus is None:
        pytest.skip("real GPUs have times of their own")
    seconds = itertools.cycle([2.0, 1.0] if is_slower else [1.0, 2.0])
    monkeypatch.setattr("harness.local.runners.attention.replay_seconds", lambda *_: next(seconds))
    monkeypatch.setattr(compiled, "is_faster_without_cudnn", attention.is_faster_without_cudnn)
    allowed: list[bool] = []

    def prepare_calls(*arguments: Any) -> Any:
        allowed.append(cudnn_sdp_enabled())
        return original(*arguments)

    original = compiled.prepare_calls
    monkeypatch.setattr(compiled, "prepare_calls", prepare_calls)
    prepared(random_model("llama").cuda())
    assert allowed == [not is_slower]
    assert cudnn_sdp_enabled()
