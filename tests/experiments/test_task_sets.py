"""Tasks of `eval` from data sets: their prompts, and the answers read from completions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from huggingface_hub import constants

from harness.config.errors import SettingError
from harness.experiments.task_sets import SETS, boxed_answer, gsm8k_answer, normal_formula
from harness.menu.names import prompt_preset
from in_process import QUICKEST_PAIR, Harness, only, results
from prompt_rows import fill_cache


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(monkeypatch, tmp_path / "hub", prompt_preset("math500"))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" 3 + 4 = <<3+4=7>>7\n#### 7", "7"),
        ("#### 1,200\n\nQuestion: Another?\nAnswer: #### 5", "1200"),
        ("The answer is 7.", None),
        ("\n\nQuestion: Another?\nAnswer: #### 5", None),
        ("#### -3.", "-3"),
    ],
)
def test_gsm8k_takes_the_number_behind_the_marks(completion: str, answer: str | None) -> None:
    assert gsm8k_answer(completion)[1] == answer


def test_numbers_are_equal_however_they_are_written() -> None:
    task = SETS["gsm8k"]
    assert all(task.is_correct(text, "1200") for text in ("1200", "1,200", "1200.", "1,200.00"))
    assert not any(task.is_correct(text, "1200") for text in ("120", "12000", "-1200", None))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"So $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{3}, no, \boxed{4}", "4"),
        (r"It is \boxed{5", None),
        (r"It is 5", None),
        (r"\boxed{}", None),
        ("\\boxed{6}\nProblem: another \\boxed{7}", "6"),
    ],
)
def test_math_takes_what_is_in_the_last_box(completion: str, answer: str | None) -> None:
    assert boxed_answer(completion)[1] == answer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("10,080", "10080"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"90^\circ", "90"),
        (r"\$18", "18"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)
def test_formulas_that_differ_in_looks_are_equal(one: str, other: str) -> None:
    assert normal_formula(one) == normal_formula(other)


@pytest.mark.parametrize(
    ("one", "other"), [("1,2", "12"), ("x^2", "x2"), ("-1", "1"), ("(1,200)", "1200")]
)
def test_other_formulas_are_not(one: str, other: str) -> None:
    assert normal_formula(one) != normal_formula(other)


def test_a_task_whose_set_was_never_downloaded_is_named(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    outcome = harness("eval", "task=gsm8k", "decoding.max_new_tokens=512", code=1)
    assert "task=gsm8k: openai/gsm8k has not been downloaded" in outcome.complaint


def test_gsm8k_shows_five_solved_questions_of_the_training_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    settings = prompt_preset("gsm8k")
    files = "main/{test,train}-00000-of-00001.parquet"
    fill_cache(monkeypatch, tmp_path / "hub", dataclasses.replace(settings, file=files))
    first, *_ = problems = SETS["gsm8k"].problems(seed=0, count=10)
    assert first.prompt.count("Question:") == 6
    assert first.prompt.startswith("Question: What is 0 + 1?\nAnswer: <<0+1=1>>\n#### 1\n\n")
    assert first.prompt.endswith(f"Question: What is {first.source_row} + 1?\nAnswer:")
    assert first.expected == str((first.source_row or 0) + 1)
    assert sorted(problem.source_row or 0 for problem in problems) == list(range(10))
    fewer = SETS["gsm8k"].problems(seed=0, count=4)
    assert fewer == problems[:4]
    assert SETS["gsm8k"].problems(seed=1, count=4) != fewer


def test_more_questions_than_there_are_is_refused() -> None:
    with pytest.raises(SettingError, match=r"num_prompts=11: .* math500 has only 10 questions"):
        SETS["math500"].problems(seed=0, count=11)


def test_eval_asks_both_arms_the_questions_of_a_set(harness: Harness) -> None:
    asked = (
        "eval",
        *QUICKEST_PAIR,
        "task=math500",
        "num_prompts=3",
        "decoding=greedy",
        "batch_size=3",
    )
    complaint = harness.refused(*asked)
    assert complaint.startswith("decoding.max_new_tokens=8: must be at least 32 for task=math500")
    outcome = harness(*asked, "decoding.max_new_tokens=32")
    assert "licence" in outcome.stderr
    merged = results("eval").query("seed == 'all'")
    assert list(merged.arm) == ["regular", "speculative"]
    assert set(merged.num_prompts) == {3}
    assert merged.operands.isna().all()
    assert merged.identical_prompts.iloc[1] == 3
    answers = pd.read_csv(only("eval_prompts.csv"))
    assert (answers.expected == answers.source_row + 1).all()
    assert not answers.correct.any()
    again = harness(*asked, "decoding.max_new_tokens=32")
    assert "6 of 6 answers are in" in again.stderr
