"""Prepared passes over trees: the numbers of plain passes, and the texts of eager trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import PROMPTS, close, random_model, random_pair
from harness.local.decoding.batch import Request
from harness.local.decoding.protocols import Runner, TreeRunner
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.tree_decision import TreeJudge
from harness.local.decoding.tree_rules import verify_rounds
from harness.local.decoding.tree_speculation import speculative_trees
from harness.local.decoding.trees import TreeShape
from harness.local.decoding.warp import Warp
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.prepared_calls import RunnerShapes
from harness.local.runners.static import StaticRunner
from harness.local.runners.tree_checks import check_trees
from harness.local.runners.tree_passes import TreeDemand
from small_heads import eagle_head, layer_config, target_model

WARM = Warp(0.8)
DEPTH, BUDGET = 3, 6
SHAPES = [(0, 0, 1, 3, 2, 4), (0, 1, 1, 2, 2, 2), (0, 0, 0, 0, 3, 5)]
TOKENS = torch.arange(21).view(3, 7) + 5
LENGTH = 20


def prepared_for(model: Any, trees: TreeDemand, **options: Any) -> PreparedRunner:
    runner = PreparedRunner(model, compiled=False, captured=True, **options)
    runner.prepare(RunnerShapes(3, 64, (1, 2), trees=trees))
    return runner


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_prepared_runner_passes_the_check_of_trees(name: str) -> None:
    """Its trees have 5 tokens, which a shape of 7 is filled up from."""
    model = random_model(name)
    check_trees(prepared_for(model, TreeDemand((7,), 7)), model, {}, 3, 64)


def decided(runner: TreeRunner, head: Any, target: Any) -> list[Any]:
    """All that is decided, with a head's trees."""
    numbers = uniforms(0, range(3), (LENGTH + 1) * (BUDGET + 1))
    what = Request(PROMPTS, numbers, WARM, LENGTH, frozenset({50}))
    drafter = head.drafter(target, WARM, BUDGET)
    records = speculative_trees(runner, drafter, what, DEPTH, BUDGET, verify_rounds)
    return [(record.rows, record.tokens, record.proposed) for record in records]


class Calls:
    """Notes trees that are read, and decided, by no prepared call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = 0
        self.decided: set[int] = set()
        original_extend, original_decide = StaticRunner.extend, Runner.decide

        def extend(runner: StaticRunner, tokens: Tensor, tree: TreeShape | None = None) -> Any:
            self.read += tree is not None
            return original_extend(runner, tokens, tree)

        def decide(runner: Runner, tokens: Tensor, *inputs: Any, tree: Any = None) -> Any:
            if tree is not None:
                self.decided.add(tokens.shape[1])
            return original_decide(runner, tokens, *inputs, tree=tree)

        monkeypatch.setattr(StaticRunner, "extend", extend)
        monkeypatch.setattr(Runner, "decide", decide)


@pytest.mark.parametrize("num_nodes", [BUDGET, 2])
def test_texts_are_those_of_eager_trees(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tree is read by a prepared pass, and decided there; one that fits none still runs."""
    target, head = target_model(), eagle_head(layer_config("llama"))
    layers = head.config.layers
    expected = decided(StaticRunner(target, hidden_layers=layers), head, target)
    judge = TreeJudge(WARM, verify_rounds)
    trees = TreeDemand((num_nodes + 1,), num_nodes + 1, [judge])
    runner = prepared_for(target, trees, hidden_layers=layers)
    calls = Calls(monkeypatch)
    assert decided(runner, head, target) == expected
    is_prepared = num_nodes == BUDGET
    assert (calls.read == 0) == is_prepared
    assert (not calls.decided) == is_prepared


def test_trees_are_captured_and_decided_on_a_gpu(gpus: Any) -> None:
    """On one, or a pretended one: the host waits for nothing while a graph is captured."""
    target, _ = random_pair("llama")
    judge = TreeJudge(WARM, verify_rounds)
    trees = TreeDemand((BUDGET + 1,), BUDGET + 1, [judge])
    outputs = []
    for device in ("cpu", "cuda:0"):
        runner = prepared_for(target.to(device), trees)
        runner.start(PROMPTS)
        tokens = TOKENS.to(device)
        shape = TreeShape(SHAPES)
        inputs = judge.examples(torch.empty(3, BUDGET + 1, 97, device=device))
        inputs = (tokens[:, 1:], *inputs[1:4], *shape.on(tokens.device))
        step, figures = runner.decide(tokens, judge, *inputs, tree=shape)
        outputs.append((step.logits.cpu(), figures[0].tolist()))
    assert close(outputs[0][0], outputs[1][0])
    assert outputs[0][1] == outputs[1][1]
