"""Planted faults, synthetic acceptance and stopwatches run the prepared code of a real run, with the same texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from harness.config.faults import FAULTS
from harness.config.run import RunnerName
from harness.config.settings import (
    DecodingSettings,
    ModelSettings,
)
from harness.engines.protocol import Question
from harness.engines.record import Preparation
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.protocols import Runner
from harness.local.engine.engine import LocalEngine
from harness.local.engine.pair import Pair
from harness.local.runners.graphs import FixedCall
from harness.local.runners.static import StaticRunner
from loaded_pairs import load, on_gpu
from planted_faults import planted
from traced import run_as_traced

DECODING = DecodingSettings(max_new_tokens=8, num_draft_tokens=3)
COIN = dataclasses.replace(DECODING, synthetic_acceptance=0.5)
Control = tuple[DecodingSettings, str]
CONTROLS: list[Control] = [
    (COIN, "none"),
    (DECODING, "none"),
    *((DECODING, name) for name in FAULTS.names()),
    (DECODING, planted("Lenience")),
]
# The others differ in decisions alone.
CONTROLS_OF_PASSES: list[Control] = [
    (COIN, "none"),
    (DECODING, "bonus_from_wrong_position"),
    (DECODING, "rollback_off_by_one"),
]


@dataclasses.dataclass
class Calls:
    """Counts calls of prepared shapes, and notes the widths of what ran without."""

    num_prepared: int = 0
    plain_extensions: list[int] = dataclasses.field(default_factory=list)
    plain_decisions: list[int] = dataclasses.field(default_factory=list)


@contextmanager
def counting() -> Iterator[Calls]:
    calls = Calls()

    def noting(widths: list[int], original: Callable[..., Any]) -> Callable[..., Any]:
        def plain(self: Any, tokens: Tensor, *rest: Any, **options: Any) -> Any:
            widths.append(tokens.shape[1])
            return original(self, tokens, *rest, **options)

        return plain

    def prepared(
        self: FixedCall, *inputs: Tensor, original: Callable[..., Any] = FixedCall.__call__
    ) -> Any:
        calls.num_prepared += 1
        return original(self, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedCall, "__call__", prepared)
        extend = noting(calls.plain_extensions, StaticRunner._extend)
        patch.setattr(StaticRunner, "_extend", extend)
        patch.setattr(Runner, "decide", noting(calls.plain_decisions, Runner.decide))
        yield calls


@pytest.fixture
def pair(save_model: Callable[..., ModelSettings]) -> Pair:
    model = save_model(num_hidden_layers=1, max_position_embeddings=64)
    draft = save_model("gpt2", n_layer=1, vocab_size=320, n_positions=64)
    return load(model, draft)


def open_engine(
    pair: Pair, decoding: DecodingSettings, runner: RunnerName, fault: str
) -> LocalEngine:
    return LocalEngine(
        pair,
        Preparation(decoding=decoding, runner=runner, batch_size=1, longest_prompt=5, fault=fault),
    )


def decided(records: Iterator[Iteration]) -> list[Any]:
    return [(record.tokens, record.num_accepted) for record in records]


def question(decoding: DecodingSettings) -> Question:
    return Question([[40, 50, 60]], decoding, seed=0, indices=[0])


def require_prepared(
    pair: Pair,
    runner: RunnerName,
    controls: list[Control],
    decided_plainly: set[int],
    move: Callable[[Pair], Pair] = lambda pair: pair,
) -> None:
    """Each control decides what it does with the eager runner, in prepared calls; without a fault also under
    stopwatches.
    """
    expected = []
    for decoding, fault in controls:
        eager_engine = open_engine(pair, decoding, "eager", fault)
        expected.append(decided(eager_engine.arms[1].loop(question(decoding).requests)))
    moved = move(pair)
    for (decoding, fault), eager in zip(controls, expected, strict=True):
        engine = open_engine(moved, decoding, runner, fault)
        assert engine.runner == runner
        arms = [engine.arms[1]]
        if fault == "none":
            arms.append(engine.stopwatches.arms()[1])
        for arm in arms:
            with counting() as calls:
                records = decided(arm.loop(question(decoding).requests))
            assert records == eager, fault
            assert not calls.plain_extensions, fault
            assert set(calls.plain_decisions) <= decided_plainly, fault
            # A draft and a verdict each; the last turn may have nothing to draft.
            assert calls.num_prepared >= 2 * (len(records) - 1) - 1, fault
        if fault == "none":
            assert arms[1].timer.phases.calls["forward"] == len(records) - 1


def test_controls_run_captured(pair: Pair, gpus: Any) -> None:
    """On a GPU, or a pretended one. Near the end of a row fewer tokens are offered than was prepared for."""
    require_prepared(pair, "graphs_only", CONTROLS, {2, 3}, move=on_gpu)


def test_controls_run_compiled(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU passes are prepared, and the decisions that follow them are not.

    Their parts run as they were traced.
    """
    run_as_traced(monkeypatch)
    require_prepared(pair, "compiled", CONTROLS_OF_PASSES, {1, 2, 3, 4})
