"""The tables of `eval`, of one run and of several compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.commands.eval.page import eval_page
from harness.commands.eval.rows import AnswerRow
from harness.commands.report.command import build
from harness.results.files import append_rows
from harness.results.runs import Run
from pages import findings
from report_files import eval_run
from wording import mentions


def test_nothing_answered_prints_nothing() -> None:
    assert eval_page([Run(eval_run(accuracy=None))]) is None


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
