"""The verdict over all checks of `recovery`, and what is printed and reported of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.commands.eval.rows import EvalRow
from harness.commands.eval.tables import losses as accuracy_losses
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import (
    Checks,
    pairs_table,
    recovery_page,
    verdict_lines,
)
from harness.reporting.names import named_runs
from harness.results.runs import Run
from harness.results.statistics.interval import Interval
from wording import mentions

RUN = {
    "run": "1", "model": "tiny", "draft": "tiny_draft", "devices": "cpu", "prompts": "tiny", "top_k": 0, "top_p": 1.0,
    "lossy": False, "lenience": 1.0, "dtype": "float32", "quantization": "none", "seed": 0, "arm": "speculative",
    "fault": "none", "status": "ok", "batch_size": 8, "false_alarm_rate": 1e-9, "num_draft_tokens": 4, "shift": 0.05,
}  # fmt: skip
GREEDY = {
    "check": "greedy", "temperature": 0.0, "verdict": "lossless", "num_prompts": 15, "num_tokens": 960,
    "identical_prompts": 15,
}  # fmt: skip
SAMPLED = {
    "check": "sampled", "temperature": 0.5, "verdict": "lossless", "num_draws": 25_000, "evidence": 0.244,
    "p_value": 0.57,
    "power": 0.9995, "rounding": 0.0, "acceptance_rate": 0.7,
}  # fmt: skip


LOSSY = {"verdict": "lossy", "p_value": 0.0, "num_draws_until": 712}


def rows(*changes: dict[str, Any], **of_all: Any) -> list[RecoveryRow]:
    """The greedy check and that of all draws, each with its changes."""
    checks = [GREEDY, SAMPLED]
    return [
        RecoveryRow(**(RUN | check | (changes[i] if i < len(changes) else {}) | of_all))
        for i, check in enumerate(checks)
    ]


@pytest.mark.parametrize("number", range(2))
def test_one_loss_is_a_loss(number: int) -> None:
    changes: list[dict[str, Any]] = [{}, {"verdict": "undecided"}]
    changes[number] = LOSSY
    assert Checks(rows(*changes)).verdict == "lossy"


def test_a_run_without_a_check_prints_nothing() -> None:
    assert recovery_page([Run([RecoveryRow(**(RUN | {"status": "failed"}))])]) is None


def test_several_runs_are_one_row_each() -> None:
    runs = [
        Run(rows({}, LOSSY, run="2", fault="lenience")),
        Run(rows({}, {"power": 0.991})),
        Run(rows(run="3", status="interrupted", num_draft_tokens=8)),
    ]
    table = pairs_table([Checks(named.run.rows, named.name) for named in named_runs(runs)])
    by_verdict = {texts[2]: texts for texts in table.shown()[1]}
    assert set(by_verdict) == {"lossy (a planted fault)", "lossless", "interrupted"}
    assert by_verdict["lossless"][3:] == ("15 of 15", "25,000", "0.57", "99.1 %")
    # As in the table of one run, and never 100 %.
    assert by_verdict["lossy (a planted fault)"][5:] == ("< 1e-300", "> 99.9 %")
    assert [row.strong for row in table.rows if row.cells[2].startswith("lossy")] == [True]
    assert "5 %" in table.notes[0]
    assert pairs_table([]).rows == ()


def test_losses_are_said_of_real_checks_alone() -> None:
    control = Checks(rows({}, LOSSY, fault="lenience"))
    assert verdict_lines([control]) == []
    (lossless,) = verdict_lines([control, Checks(rows())])
    assert lossless.text == "Lossless in every check: tiny with tiny_draft."
    (lossy,) = verdict_lines([Checks(rows({"verdict": "lossy"}))])
    assert lossy.text == "Lossy: tiny with tiny_draft."
    evaluated = EvalRow(
        model="13B", draft="7B", arm="speculative", seed="all", status="ok", accuracy=0.4
    )
    compared = dataclasses.replace(evaluated, difference=Interval(-0.021), mcnemar_p_value=0.3)
    assert accuracy_losses([Run([evaluated])]) == []
    (same,) = accuracy_losses([Run([compared]), Run([evaluated]), Run([compared])])
    assert (
        same.text
        == "Regular and speculative arms: no significant difference in accuracy (2 evaluations)."
    )
    differing = dataclasses.replace(compared, mcnemar_p_value=0.01)
    (sentence,) = accuracy_losses([Run([differing]), Run([compared])])
    assert mentions(sentence.text, "differs", "p < 0.05", "13B with 7B", "-2.1 points")
