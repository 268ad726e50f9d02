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
    losses,
    pairs_table,
    recovery_page,
)
from harness.config.machine import note_command_line
from harness.results.runs import Run
from harness.results.statistics.interval import Interval
from pages import full, short, tables_of
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
    "significance_level": 2e-10, "power": 0.9995, "rounding": 0.0, "acceptance_rate": 0.7,
}  # fmt: skip


LOSSY = {"verdict": "lossy", "p_value": 0.0, "num_draws_until": 712}


def rows(*changes: dict[str, Any], **of_all: Any) -> list[RecoveryRow]:
    """The greedy check, that of one sampling setting, and that of all draws, each with its changes."""
    checks = [GREEDY, SAMPLED | {"check": "setting", "sampling": "top_k=5"}, SAMPLED]
    return [
        RecoveryRow(**(RUN | check | (changes[i] if i < len(changes) else {}) | of_all))
        for i, check in enumerate(checks)
    ]


def printed(of: list[RecoveryRow], capsys: pytest.CaptureFixture[str]) -> str:
    print(full(recovery_page([Run(of)])))
    return " ".join(capsys.readouterr().out.split())


def test_lossless_needs_every_check() -> None:
    summary = Checks(rows())
    assert summary.verdict == "lossless"
    assert "15 of 15 greedy texts identical" in summary.findings
    assert "25,000 drawn tokens follow the target's distribution" in summary.findings


@pytest.mark.parametrize("number", range(3))
def test_one_loss_is_a_loss(number: int) -> None:
    changes: list[dict[str, Any]] = [{}, {"verdict": "undecided"}, {"verdict": "undecided"}]
    changes[number] = LOSSY
    assert Checks(rows(*changes)).verdict == "lossy"


def test_undecided_says_what_is_missing() -> None:
    weak = {"verdict": "undecided", "power": 0.43}
    assert (
        Checks(rows({}, weak)).verdict == "lossless"
    )  # what one part cannot tell, all together can
    summary = Checks(rows({}, weak, weak))
    assert summary.verdict == "undecided"
    assert "raise num_draws" in summary.in_short
    assert "43.0 %" in summary.in_short
    cut_short = Checks(rows({"verdict": "undecided", "num_cut_short": 2}))
    assert "2 of 15 greedy texts ended before" in cut_short.in_short


def test_what_was_not_tested_is_not_called_exact() -> None:
    untested = {"verdict": "undecided", "power": 0.0, "p_value": None, "num_draws": 0}
    summary = Checks(rows({}, untested, untested))
    assert summary.verdict == "undecided"
    assert "nothing was tested by 0 drawn tokens" in summary.findings
    assert "follow" not in summary.findings


def test_lenience_is_lossy_even_if_no_check_shows_it() -> None:
    summary = Checks(rows(lossy=True, lenience=0.9))
    assert summary.verdict == "lossy"
    assert "lenience 0.9 is lossy by definition" in summary.reason


def test_a_server_tells_no_number_format() -> None:
    parted = {"divergence_position": 7, "logit_margin": -0.1, "logit_tolerance": 0.3}
    sentence = Checks(rows(parted | {"dtype": None})).findings
    assert "within rounding, 0.3" in sentence
    assert "None" not in sentence


def test_the_printed_report(capsys: pytest.CaptureFixture[str]) -> None:
    parted = {
        "identical_prompts": 14,
        "divergence_position": 7,
        "logit_margin": -0.1,
        "logit_tolerance": 0.3,
    }
    shown = printed(rows(parted | {"dtype": "bfloat16"}, {"rounding": 0.25}), capsys)
    assert "8 requests in flight · K=4 · temperature 0.5 · float32" in shown
    assert "within the rounding of bfloat16, 0.3" in shown
    assert "as it should be" in shown
    assert "all draws" in shown
    assert "top_k=5" not in shown.replace("Drawn top_k=5.", ""), (
        "of parts only those that are lossy"
    )
    assert "The sampled tests call a lossless pair lossy in at most 1e-09 of such runs" in shown
    assert mentions(shown, "shifts of up to 0.25", "rounding")
    # A text that was cut short decides nothing, and the margin of another is as it is.
    shown = printed(rows(parted | {"verdict": "undecided", "num_cut_short": 1}), capsys)
    assert "within the rounding of float32, 0.3" in shown
    shown = printed(rows(parted | {"verdict": "lossy", "logit_margin": 0.31}), capsys)
    assert "beyond the rounding of float32, 0.3" in shown
    assert "was planted" not in printed(rows(fault=None), capsys)
    shown = printed(
        rows({}, LOSSY, fault="lenience"),
        capsys,
    )
    assert "fault=lenience was planted" in shown
    assert "fail 1 of 2 tests, the first one after 712" in shown
    assert mentions(shown, "drawn top_k=5", "shows after 712")
    ended = printed(rows(status="interrupted"), capsys)
    assert "no verdict: interrupted so far 15 of 15 greedy texts identical; 25,000" in ended
    assert "only a whole run decides" in ended
    assert "· K=4 ·" in ended
    assert "nothing was sampled" in printed(rows()[:1], capsys)


def test_what_to_type_next() -> None:
    def shown(of: list[RecoveryRow]) -> str:
        note_command_line(["recovery", "K=4", "rule=typical"])
        return " ".join(short(recovery_page([Run(of)])).split())

    weak = {"verdict": "undecided", "power": 0.4, "num_draws_needed": 12345}
    assert "cannot tell 25,000 drawn tokens" in shown(rows({}, weak, weak))
    assert "harness recovery K=4 rule=typical num_draws=13000" in shown(rows({}, weak, weak))
    assert "Next" not in shown(rows(engine="local"))
    assert "Next" not in shown(rows(engine="server"))
    assert "harness recovery K=4 rule=deepmind" in shown(rows(lossy=True, rule="typical"))
    assert "runner=eager" in shown(rows({"verdict": "lossy"}, runner="static"))
    assert "runner=eager" in shown(rows({"verdict": "lossy"}, runner="static", fault=None))
    assert "Next" not in shown(rows({"verdict": "lossy"}, runner="static", fault="lenience"))


def test_a_run_without_a_check_prints_nothing() -> None:
    assert recovery_page([Run([RecoveryRow(**(RUN | {"status": "failed"}))])]) is None


def test_one_run_is_shown_by_its_checks() -> None:
    (table,) = tables_of(recovery_page([Run(rows())]))
    assert [row.cells[0] for row in table.rows] == ["greedy", "all draws"]
    missed = recovery_page([Run(rows(fault="lenience"))])
    assert missed is not None
    assert missed.doubts == ["A control: fault=lenience was planted, and the checks must find it."]


def test_several_runs_are_one_row_each() -> None:
    runs = [
        Run(rows({}, LOSSY, run="2", fault="lenience")),
        Run(rows({}, {}, {"power": 0.991})),
        Run(rows(run="3", status="interrupted", num_draft_tokens=8)),
    ]
    table = pairs_table(runs)
    by_verdict = {texts[2]: texts for texts in table.shown()[1]}
    assert set(by_verdict) == {"lossy (a planted fault)", "lossless", "interrupted"}
    assert by_verdict["lossless"][3:] == ("15 of 15", "25,000", "0.57", "99.1 %")
    # As in the table of one run, and never 100 %.
    assert by_verdict["lossy (a planted fault)"][5:] == ("< 1e-300", "> 99.9 %")
    assert [row.strong for row in table.rows if row.cells[2].startswith("lossy")] == [True]
    assert "5%" in table.notes[0]
    assert pairs_table([]).rows == ()


def test_losses_are_said_of_real_checks_alone() -> None:
    control = Checks(rows({}, LOSSY, fault="lenience"))
    assert losses([control]) == []
    (lossless,) = losses([control, Checks(rows())])
    assert lossless.text == "Lossless in every check: tiny with tiny_draft."
    (lossy,) = losses([Checks(rows({"verdict": "lossy"}))])
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
