from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.config.errors import RunError
from harness.results.answers import Answer, read_answers
from harness.results.files import append_rows

ANSWER = Answer(
    prompt_index=7,
    seed=3,
    arm="speculative",
    a=8,
    b=12,
    expected=96,
    completion=' "96", or\r so ',
    answer=96,
    correct=True,
    num_tokens=5,
    time_ms=1.0 / 3,
    outcomes=((4, 2), (1, 1)),
    answered_at="2026-01-01T00:00:00+00:00",
)


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    answers = [
        ANSWER,
        dataclasses.replace(ANSWER, arm="regular", completion="", answer=None, correct=False, outcomes=()),
        dataclasses.replace(ANSWER, answer=-12, correct=False, completion="NA"),
    ]
    append_rows(tmp_path / "store.csv", [answer.as_row() for answer in answers])
    assert read_answers(tmp_path / "store.csv") == answers


def test_rows_carry_the_acceptance_rate() -> None:
    assert ANSWER.as_row()["acceptance_rate"] == 3 / 5
    assert dataclasses.replace(ANSWER, outcomes=()).as_row()["acceptance_rate"] is None


def test_no_store_holds_no_answers(tmp_path: Path) -> None:
    assert read_answers(tmp_path / "store.csv") == []


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"\xff\xfe\n1\n", b"prompt_index,seed\nx,1\n"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "store.csv").write_bytes(content)
    with pytest.raises(RunError, match="remove it, or set resume=false"):
        read_answers(tmp_path / "store.csv")
