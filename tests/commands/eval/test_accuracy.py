"""The tables of `eval`, of one run and of several compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.commands.eval.page import accuracy_table, eval_page
from harness.commands.eval.rows import AnswerRow, EvalRow
from harness.commands.report.command import build
from harness.config.machine import note_command_line
from harness.reporting.table import Table
from harness.results.files import append_rows
from harness.results.runs import Run
from pages import findings, short, tables_of
from report_files import eval_run
from wording import mentions

ARM = {
    "run": "1", "status": "ok", "model": "13B", "draft": "7B", "devices": "a GPU", "task": "multiplication",
    "operands": "1-99", "batch_size": 64, "num_draft_tokens": 4, "temperature": 0.5, "top_k": 0, "top_p": 1.0,
    "lenience": 1.0, "lossy": False, "dtype": "float16", "quantization": "none", "num_prompts": 1000,
    "num_resumed": 0, "num_parsed": 990, "ms_per_answer": 12.3456, "accuracy": 0.425, "wald_low": 0.394,
    "wald_high": 0.456, "wilson_low": 0.395, "wilson_high": 0.456,
}  # fmt: skip
COMPARED = {
    "arm": "speculative", "acceptance_rate": 0.61, "difference": 0.01, "difference_low": -0.02, "difference_high": 0.04,
    "mcnemar_p_value": 0.55,
}  # fmt: skip


def rows(*seeds: str, **changes: Any) -> list[EvalRow]:
    """Both arms of each seed, and merged."""
    return [
        EvalRow.from_values(ARM | {"seed": seed} | arm | changes)
        for seed in (*seeds, "all")
        for arm in ({"arm": "regular", "num_draft_tokens": None}, COMPARED)
    ]


def headings(table: Table) -> list[str]:
    return [column.heading.replace("\n", " ") for column in table.shown()[0]]


@pytest.mark.parametrize(
    "changes",
    [{}, {"mcnemar_p_value": 0.01, "difference": -0.021, "lossy": True, "rule": "typical"}],
)
def test_the_answer_is_short(changes: dict[str, Any]) -> None:
    note_command_line(["eval"])
    text = short(eval_page([Run(rows("0", **changes))]))
    # `Saved` is the twelfth.
    assert len(text.splitlines()) <= 11
    assert max(map(len, text.splitlines())) <= 80
    assert ("rule=deepmind" in text) == bool(changes)


def test_several_seeds_are_printed_with_their_merged_rows() -> None:
    (table,) = tables_of(eval_page([Run(rows("0", "1"))]))
    assert "seed" in headings(table)
    seeds = [texts[headings(table).index("seed")] for texts in table.shown()[1]]
    assert seeds == ["0", "0", "1", "1", "all", "all"]
    assert [row.strong for row in table.rows] == [False] * 4 + [True] * 2


def test_nothing_answered_prints_nothing() -> None:
    assert eval_page([Run(rows(accuracy=None))]) is None


def test_a_run_alone_is_reported_by_seed_and_several_by_pair() -> None:
    detailed = accuracy_table([Run(rows("0", "1"))])
    assert len(detailed.rows) == 6
    assert "difference" in headings(detailed)
    assert "pair" not in headings(detailed)
    runs = [
        Run(rows("0", "1", run="2", model="30B")),
        Run(rows("0", "1")),
        Run(rows("0", run="3", draft=None)[:3]),
    ]
    compared = accuracy_table(runs)
    assert "seed" not in headings(compared)
    texts = compared.shown()[1]
    assert [line[0].split("\n")[0] for line in texts] == [
        "13B",
        "13B with 7B",
        "",
        "30B with 7B",
        "",
    ]
    assert texts[2][headings(compared).index("difference")] == "+1.0\n-2.0 to 4.0"
    assert texts[2][headings(compared).index("K")] == "4"
    assert accuracy_table([]).rows == ()


def measured_eval(directory: Path, correct: Sequence[bool], **changes: Any) -> Path:
    """An evaluation with these answers of both arms, in a directory of its own."""
    rows = eval_run(seeds=(0,), directory=str(directory), **changes)
    append_rows(directory / "eval.csv", rows)
    (directory / "environment.json").write_text("{}")
    answers = [
        AnswerRow(
            run=rows[0].run, prompt_index=index, seed=0, arm=arm, a=index, b=1, expected="2", completion="2",
            answer="2", correct=is_correct, num_tokens=1, time_ms=1.0, outcomes=[], acceptance_rate=None,
            answered_at="2026-11-20T10:00:00+00:00",
        )
        for arm in ("regular", "speculative")
        for index, is_correct in enumerate(correct)
    ]  # fmt: skip
    append_rows(directory / "eval_prompts.csv", answers)
    return directory


def test_a_sweep_says_how_what_it_varied_changes_the_accuracy(tmp_path: Path) -> None:
    """60 of 100 against 82 of the same 100: 22 points, whichever comes first in the sweep."""
    four_bit = [index < 60 for index in range(100)]
    full_precision = [index < 82 for index in range(100)]
    directories = [
        measured_eval(tmp_path / "1", four_bit, model="tiny_4bit", quantization="4bit"),
        measured_eval(tmp_path / "2", full_precision, model="tiny", quantization="none"),
        # Other questions are not compared.
        measured_eval(tmp_path / "3", four_bit, model="tiny", task="addition"),
    ]
    first, *others = (line.text for line in findings(build(directories)))
    assert mentions(first, "tiny_4bit against tiny, regular: -22.0 points")
    low, high = map(float, re.findall(r"interval (-[\d.]+) to (-[\d.]+)", first)[0])
    # Wald's interval is from -30.1 to -13.9; this one is a little wider.
    assert -30.5 < low < -30.1
    assert -13.9 < high < -13.5
    assert mentions(first, "same 100 questions")
    assert any("no significant difference" in other for other in others)
    assert not any("against" in other for other in others)


def test_a_sweep_over_drafts_has_one_regular_arm(tmp_path: Path) -> None:
    directories = [
        measured_eval(tmp_path / draft, [True] * 50 + [False] * 50, draft=draft)
        for draft in ("7B", "lookup")
    ]
    assert not any("against" in line.text for line in findings(build(directories)))
