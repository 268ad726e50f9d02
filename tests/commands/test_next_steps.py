"""Every command that an answer names as the next one would run."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.commands.eval.page import eval_page
from harness.commands.latency.page import latency_page
from harness.config.command_line import Words
from harness.reporting import words
from harness.results.runs import Run
from in_process import QUICKEST_PAIR, Harness
from next_steps import NextStep, accepted, all_accepted, collected
from pages import short
from report_files import eval_run, latency_run, over

BY_K = "tokens_per_iteration_by_num_draft_tokens"
# A run of `latency` with an interval, K=4 and known costs.
FIGURES: dict[str, Any] = {
    "num_tokens": 960, "mean_proposed": 4.0, "mean_num_draft_tokens": 4.0,
     "acceptance_rate": 0.6, "mean_acceptance_length": 3.5, "tokens_per_iteration": 3.5, "draft_ms": 80.0,
    "verify_ms": 330.0, "predicted_speedup": 1.9, "speedup": 1.8, "speedup_low": 1.7, "speedup_high": 1.9,
    "speedup_covers": over(15), "visible_difference": 0.05, BY_K: [1.9, 2.6, 3.1, 3.5],
}  # fmt: skip
UNSURE = {"speedup": 1.02, "speedup_low": 0.99, "speedup_high": 1.05}
SLOWER = {"speedup": 0.8, "speedup_low": 0.7, "speedup_high": 0.9}
NO_BOUNDS = {"speedup_low": None, "speedup_high": None}


@pytest.fixture(autouse=True)
def whole_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long command is not shortened to `the same with K=8`."""
    monkeypatch.setattr(words, "_LONGEST_COMMAND", 10**6)


@pytest.mark.parametrize(
    "typed",
    [
        "latency",
        "latency model=tiny_draft draft=early_exit K=4 T=0 n=20",
        "latency precision=2% budget=30s prompts=english",
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {BY_K: [1.9, 1.95, 1.96, 1.96]},
        {BY_K: [1.01, 1.01, 1.01, 1.01]},
        UNSURE,
        SLOWER | {BY_K: None},
        NO_BOUNDS | {"speedup_covers": over(5), "num_prompts": 5},
        {"processor_share": 0.2, "num_threads": 2, "num_cores": 2},
    ],
)
def test_the_next_command_of_latency_is_accepted(typed: str, changes: dict[str, Any]) -> None:
    Words.divide(shlex.split(typed)).note()
    regular, speculative = latency_run(**FIGURES | changes)
    costs = dict.fromkeys(
        ("draft_ms", "verify_ms", "mean_acceptance_length", "tokens_per_iteration")
    )
    rows = [dataclasses.replace(regular, target_step_ms=320.0, **costs), speculative]
    with collected() as steps:
        short(latency_page([Run(rows)]))
    all_accepted(steps)


def test_a_run_without_a_budget_is_accepted() -> None:
    Words.divide(["latency", "precision=2%", "budget=30s"]).note()
    spent = {"speedup_covers": over(5), "stopped_by": "budget"}
    with collected() as steps:
        short(latency_page([Run(latency_run(**FIGURES | NO_BOUNDS | spent))]))
    assert any("budget=null" in step.command for step in steps)
    all_accepted(steps)


@pytest.mark.parametrize(
    "changes", [{}, {"mcnemar_p_value": 0.001, "model": "x/served", "draft": None}]
)
def test_the_next_command_of_eval_is_accepted(changes: dict[str, Any]) -> None:
    Words.divide(["eval", "operands=[1,9]", "model=tiny", "n=9", "K=2"]).note()
    rows = eval_run(**{"operands": "1-99", "replacement": True, "num_prompts": 10} | changes)
    with collected() as steps:
        short(eval_page([Run(rows)]))
    all_accepted(steps)


@pytest.mark.parametrize("k", [4, 8])
def test_the_next_command_of_a_prediction_measures_the_same_pair(harness: Harness, k: int) -> None:
    """The best K, or twice the largest that has a price."""
    few = ["engine=simulated", "num_prompts=8", "tokens=100", "resume=false"]
    for number in (4, k):
        harness("latency", *few, f"K={number}", f"hydra.run.dir=runs/{number}")
    with collected() as steps:
        harness("plan", "costs=runs", "acceptance=0.9")
    step = steps[0]
    settings = accepted(step)
    assert settings.engine.name == "simulated"
    assert settings.decoding.num_draft_tokens == {4: 4, 8: 16}[k]


def test_the_command_of_a_row_measures_its_pair() -> None:
    [*_, row] = latency_run(engine="local", model="13B", draft="./my head")
    settings = accepted(NextStep("", command=words.latency_of(row, "K=8", "batch_size=2")))
    assert (settings.model.name, settings.draft.name) == ("13B", "./my head")
    assert (settings.decoding.num_draft_tokens, settings.batch_size) == (8, 2)
    served = dataclasses.replace(row, engine="server")
    command = words.latency_of(served, "K=8", "repeats=5")
    assert command == "harness latency K=8 repeats=5 -- YOUR_SERVER_COMMAND"


def test_the_steps_of_runs_are_accepted_and_one_runs(harness: Harness) -> None:
    lines = [json.dumps({"prompt": f"Count {n}.", "completion": "one two"}) for n in range(3)]
    Path("mine.jsonl").write_text("\n".join(lines))
    few = [*QUICKEST_PAIR, "tokens=4", "num_warmup=0"]
    texts = [*QUICKEST_PAIR, "up_to=2", "texts_per_prompt=1"]
    with collected() as steps:
        harness("acceptance", *texts, "prompts=./mine.jsonl", "T=0")
        harness("latency", *few, "num_prompts=2", "draft=early_exit_1")
        harness("latency", "-m", *few, "num_prompts=2", "draft=early_exit_1", "K=1,2")
        harness("plan", *QUICKEST_PAIR)
        harness(
            "recovery", *QUICKEST_PAIR, "num_draws=1000", "num_prompts=2", "tokens=4", code=None
        )
    all_accepted(steps)
    measure = next(step for step in steps if step.text == "measure it")
    asked = shlex.split(measure.command)[1:]
    assert {"prompts=./mine.jsonl", "T=0"} < set(asked)
    # It runs as it was typed, but for its length.
    harness(*asked, "tokens=4", "num_prompts=2", "num_warmup=0")
