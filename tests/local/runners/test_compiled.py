"""Compiled passes give the plain tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from transformers import PreTrainedModel

from architectures import PROMPTS, random_model, random_pair
from chains import autoregressive, row_steps, speculative
from harness.config.amounts import BUCKET
from harness.local.decoding.loop import RowRequest
from harness.local.decoding.protocols import Runner
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.compiled import Part
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from tiny_checkpoints import load, save_random
from traced import run_as_traced

WARP = Warp(1.0)
K = 3


def requests(
    length: int = 10, prompts: list[list[int]] = PROMPTS, device: str = "cpu", stop: int = 50
) -> list[RowRequest]:
    """Rows end at different times: at a stop token, or at the length limit after different numbers of iterations."""
    return [
        RowRequest(prompt, uniforms(0, index, length + 1, device), WARP, length, frozenset({stop}))
        for index, prompt in enumerate(prompts)
    ]


def compiled(model: PreTrainedModel, widths: tuple[int, ...], batch_size: int = 3) -> Any:
    runner = StaticRunner(model)
    runner.fix(batch_size, 60, widths)
    runner.compile()
    return runner


def written(target: Runner, draft: Runner, what: list[RowRequest]) -> list[object]:
    """All that both decoders decide."""
    drafter = ModelDrafter(draft, WARP)
    iterations = speculative(target, drafter, what, K)
    return [*row_steps(autoregressive(target, what)), *row_steps(iterations)]


def regular_tokens(runner: Runner, what: list[RowRequest]) -> list[object]:
    return [row_step.tokens for row_step in row_steps(autoregressive(runner, what))]


def test_compiled_passes_give_the_plain_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and smaller batches, and texts that outgrow the compiled slots. Parts run as they were traced."""
    run_as_traced(monkeypatch)
    target, draft = random_pair("gemma2")
    fast = compiled(target, (1, K + 1)), compiled(draft, (1, 2))
    plain = SnapshotRunner(target), SnapshotRunner(draft)
    longer = [[7] * (BUCKET - 8), *PROMPTS[:2]]
    for what in (
        requests(5, PROMPTS[1:]),
        requests(5, [*PROMPTS, [7, 8, 9]]),
        requests(16, longer, stop=-1),
    ):
        assert written(*fast, what) == written(*plain, what)
    expected = written(*plain, requests())
    prompts: list[int] = []
    for model in (target, draft):
        model.register_forward_pre_hook(
            lambda module, arguments, named: prompts.append(named["input_ids"].shape[1]),
            with_kwargs=True,
        )
    assert written(*fast, requests()) == expected
    longest = max(map(len, PROMPTS))
    assert prompts == [longest, longest, longest - 1], "every step runs a compiled pass"


def test_a_model_in_4_bit_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = run_as_traced(monkeypatch)
    settings = save_random(tmp_path, settings={"quantization": "4bit"})
    model = load(settings).target.model
    fast = compiled(model, (1, K + 1))
    # What is before the layers of a width, all three layers, and what is behind them.
    assert len(parts) == 2 * 3
    products = [node for node in parts[1].graph.nodes if "bitsandbytes" in str(node.target)]
    assert len(products) == 7
    what = requests()
    drafts = SnapshotRunner(model)
    assert written(fast, drafts, what) == written(SnapshotRunner(model), drafts, what)


def test_what_torch_cannot_trace_is_refused_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of gpt-oss are multiplied in bfloat16 alone where torch traces."""
    run_as_traced(monkeypatch)
    line = r"cannot be compiled: torch cannot trace its code \(moe.py, line \d+: return torch"
    with pytest.raises(UnsupportedModelError, match=line):
        compiled(random_model("gpt_oss"), (1,))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidCxxCompiler(), "this machine has no C\\+\\+ compiler"),
        (KeyError("node"), r"torch's compiler failed \(KeyError\)"),
    ],
)
def test_a_compiler_that_fails_is_named(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InductorError(error, None)

    run_as_traced(monkeypatch)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    with pytest.raises(UnsupportedModelError, match=f"cannot be compiled: {reason}"):
        compiled(random_model("llama"), (1,))


def test_tokens_that_fill_a_pass_stay_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 has as many positions as its context has tokens."""
    run_as_traced(monkeypatch)
    model = random_model("gpt2", n_positions=16)
    what = requests(5, [PROMPTS[2]], stop=-1)  # 11 + 5 = 16
    fast = compiled(model, (1, K + 1), 1), compiled(model, (1, 2), 1)
    assert written(*fast, what) == written(SnapshotRunner(model), SnapshotRunner(model), what)


def test_8_bit_is_refused() -> None:
    model = random_model("llama")
    model.is_loaded_in_8bit = True
    with pytest.raises(UnsupportedModelError, match="8 bit"):
        compiled(model, (1,))


def test_wrong_compiled_passes_are_refused_and_the_runner_goes_on_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_as_traced(monkeypatch)
    model = random_model("llama")
    runner = StaticRunner(model)
    call = Part.__call__

    def wrong(self: Part, *inputs: torch.Tensor) -> Any:
        return [1.5 * output for output in call(self, *inputs)]

    monkeypatch.setattr(Part, "__call__", wrong)
    runner.fix(3, 60, (1, 4))
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        runner.compile()
    what = requests()
    assert regular_tokens(runner, what) == regular_tokens(SnapshotRunner(model), what)


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="torch hands its folder to the linker unquoted")
def test_inductor_gives_the_plain_tokens() -> None:
    model = random_model("llama", num_hidden_layers=1)
    fast = compiled(model, (1,), 1)
    compilations = dict(counters["inductor"])
    what = requests(20, PROMPTS[:1])
    assert regular_tokens(fast, what) == regular_tokens(SnapshotRunner(model), what)
    assert counters["inductor"] == compilations, "all compilations belong in `compile`"
