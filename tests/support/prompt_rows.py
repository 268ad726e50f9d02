"""Rows with the columns of published prompt sets, and the hub's cache with them. The texts are our own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from harness.config.settings import PromptSettings

Row = dict[str, Any]


def _conversation(number: int) -> list[Row]:
    return [
        {"from": "human", "value": f"What is {number} plus 1?"},
        {"from": "gpt", "value": f"It is {number + 1}."},
        {"from": "human", "value": "And plus 2?"},
    ]


def _kind(number: int) -> str:
    return ("writing", "math")[number % 2]


# A row of each set, by its number. The columns are those of the real files.
ROWS: dict[str, Callable[[int], Row]] = {
    "spec_bench": lambda n: {
        "question_id": n, "category": _kind(n), "turns": [f"Question {n}?", "Why?"][: 1 + n % 2],
    },
    "speed_bench": lambda n: {
        "question_id": f"id{n}", "category": _kind(n), "sub_category": "", "source": "ours",
        "turns": [f"Question {n}?"], "src_id": str(n), "difficulty": "", "multiturn": False,
    },
    "mt_bench": lambda n: {
        "question_id": n, "category": _kind(n), "prompt": [f"Question {n}?", "Why?"], "reference": [],
    },
    "gsm8k": lambda n: {"question": f"What is {n} + 1?", "answer": f"<<{n}+1={n + 1}>>\n#### {n + 1}"},
    "math500": lambda n: {
        "problem": f"What is ${n}+1$?", "solution": f"$\\boxed{{{n + 1}}}$", "answer": str(n + 1),
        "subject": ("Algebra", "Geometry")[n % 2], "level": 1, "unique_id": f"test/algebra/{n}.json",
    },
    "humaneval": lambda n: {
        "task_id": f"HumanEval/{n}", "prompt": f"def f{n}():", "canonical_solution": "    pass",
        "test": "", "entry_point": f"f{n}",
    },
    "mbpp": lambda n: {
        "task_id": n, "text": f"Write a function that returns {n}.", "code": "", "test_setup_code": "",
        "test_list": [f"assert f() == {n}", "assert f"], "challenge_test_list": [],
    },
    "alpaca": lambda n: {
        "instruction": f"Name {n} animals.", "input": "Only birds." if n % 2 else "", "output": "",
        "text": "Below is an instruction.",
    },
    "cnn_dailymail": lambda n: {"article": f"Rain fell on day {n}.", "highlights": "Rain.", "id": str(n)},
    "sharegpt": lambda n: {"id": f"x{n}_0", "conversations": _conversation(n)},
    "longbench_v2": lambda n: {
        "_id": str(n), "domain": ("Code", "Novels")[n % 2], "sub_domain": "", "difficulty": "easy",
        "length": "short", "question": "Who?", "answer": "A", "context": f"Ann met Bob {n} times.",
        **{f"choice_{letter}": f"Choice {letter}" for letter in "ABCD"},
    },
    "speculators": lambda n: {"prompt": f"Question {n}?"},
    "lengths": lambda n: {"article": f"On day {n} " + 400 * "rain fell, ", "highlights": "", "id": str(n)},
}  # fmt: skip
# The same files, asked in other words.
ROWS |= {
    "gsm8k_boxed": ROWS["gsm8k"],
    "math500_boxed": ROWS["math500"],
    "humaneval_task": ROWS["humaneval"],
}
NUM_ROWS = 10


def fill_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, settings: PromptSettings) -> None:
    """Write a set's files where the hub's client keeps what it has fetched, or where the settings say."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    rows = [ROWS[settings.name](number) for number in range(NUM_ROWS)]
    directory = Path()
    if settings.repository is not None:
        owned = f"datasets--{settings.repository.replace('/', '--')}"
        directory = cache / owned / "snapshots" / str(settings.revision)
    for file in settings.files:
        write_rows(directory / file, rows)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a table in the format that the file's name has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        pandas.DataFrame(rows).to_parquet(path)
