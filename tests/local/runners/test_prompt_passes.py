"""Prompts read by prepared passes: the eager runner's outputs, one call for a batch, and no wait for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import SERVED, random_model
from harness.local.decoding.protocols import Runner, Step
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.eager import EagerRunner
from harness.local.runners.graphs import FixedCall
from harness.local.runners.prepared_calls import RunnerShapes
from harness.local.runners.prompt_passes import buckets

LAYERS = (0, 2)
LONGEST = 40
LENGTHS = [[1], [LONGEST], [7, 33, 1], [32, 32], [LONGEST, 2]]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [
        [(7 * row + place) % 50 for place in range(length)] for row, length in enumerate(lengths)
    ]


def prepared(model: Any, longest_prompt: int = LONGEST) -> PreparedRunner:
    runner = PreparedRunner(model, compiled=False, captured=True, hidden_layers=LAYERS)
    runner.prepare(RunnerShapes(3, 60, (1, 4), longest_prompt=longest_prompt))
    return runner


def outputs(runner: Runner, prompts: list[list[int]], device: str = "cpu") -> list[Tensor]:
    """Outputs after prompts, and after tokens of which a row takes two back."""
    first = runner.start(prompts)
    fed = torch.tensor([[3, 4, 5, 6]] * len(prompts), device=device)
    steps = [first, runner.extend(fed)]
    runner.keep([2 if row else 4 for row in range(len(prompts))])
    steps.append(runner.extend(fed[:, :1]))
    return [
        *real(first, prompts),
        *(one for step in steps[1:] for one in (step.logits, step.hidden)),
    ]


def require_close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def real(step: Step, prompts: list[list[int]]) -> list[Tensor]:
    """The outputs after prompts, without the states of padding."""
    assert step.hidden is not None
    rows = zip(step.hidden, prompts, strict=True)
    return [step.logits, *(states[-len(prompt) :] for states, prompt in rows)]


@pytest.mark.parametrize("name", SERVED)
def test_outputs_are_those_of_the_eager_runner(name: str) -> None:
    model = random_model(name)
    fast, eager = prepared(model), EagerRunner(model, hidden_layers=LAYERS)
    for lengths in LENGTHS:
        prompts = prompts_of(lengths)
        require_close(outputs(fast, prompts), outputs(eager, prompts))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpus")
def test_a_batch_is_read_by_one_call_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = prepared(random_model("llama").cuda())
    calls = 0
    original = FixedCall.__call__

    def call(self: FixedCall, *inputs: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return original(self, *inputs)

    monkeypatch.setattr(FixedCall, "__call__", call)
    for lengths in LENGTHS:
        calls = 0
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner.start(prompts_of(lengths))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert calls == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("gpus")
def test_captured_passes_give_the_eager_outputs() -> None:
    model = random_model("llama")
    expected = [
        outputs(EagerRunner(model, hidden_layers=LAYERS), prompts_of(one)) for one in LENGTHS
    ]
    runner = prepared(model.cuda())
    for lengths, wanted in zip(LENGTHS, expected, strict=True):
        found = outputs(runner, prompts_of(lengths), "cuda:0")
        require_close([one.cpu() for one in found], wanted)


def test_longer_prompts_and_equal_ones_are_read_as_before() -> None:
    """Equal prompts are read once, whatever their number."""
    model = random_model("llama")
    runner, eager = prepared(model, 20), EagerRunner(model, hidden_layers=LAYERS)
    for prompts in (prompts_of([LONGEST, 3]), [[5, 6, 7]] * 3):
        require_close(outputs(runner, prompts), outputs(eager, prompts))


@pytest.mark.parametrize(
    ("longest", "num_rows", "num_slots", "expected"),
    [
        (1, 1, 128, [32]),
        (33, 1, 128, [32, 64]),
        (1000, 1, 4096, [32, 64, 128, 256, 512, 1024]),
        (1000, 1, 128, [32, 64, 128]),
        (1000, 16, 4096, [32, 64]),
        (1000, 64, 4096, []),
    ],
)
def test_buckets(longest: int, num_rows: int, num_slots: int, expected: list[int]) -> None:
    assert buckets(longest, num_rows, num_slots) == expected
