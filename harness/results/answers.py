"""Answers of `eval`: rows of its prompts file, and the store in which a run finds what an earlier one answered.

The store is a CSV file named after a digest of everything that determines an answer and its time, beside the file that
collects the arm rows. Answers are appended batch by batch, so whatever ends a run, the same command goes on from there.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.errors import RunError
from harness.results.acceptance import Acceptance


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question as one arm answered it.

    Attributes:
        prompt_index: of the question in its seed.
        expected: the right answer.
        completion: what the model said up to the end of the line.
        answer: the integer read from it; None where it has none.
        time_ms: time of the question's batch over the questions in it, measured at `answered_at` (UTC).
        outcomes: (num_proposed, num_accepted) of each iteration; empty in the regular arm.
    """

    prompt_index: int
    seed: int
    arm: str
    a: int
    b: int
    expected: int
    completion: str
    answer: int | None
    correct: bool
    num_tokens: int
    time_ms: float
    outcomes: tuple[tuple[int, int], ...]
    answered_at: str

    @property
    def key(self) -> tuple[str, int, int]:
        """Arm, seed and index of the question: once in every run."""
        return self.arm, self.seed, self.prompt_index

    def as_row(self) -> dict[str, Any]:
        """Cells of the CSV files."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return row | {"outcomes": json.dumps(self.outcomes), "acceptance_rate": self.acceptance.acceptance_rate}

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(self.outcomes)

    @classmethod
    def from_row(cls, row: dict[str, str]) -> Answer:
        """The reverse of `as_row`, from text. Raises KeyError or ValueError for a row that is none of ours."""
        return cls(
            prompt_index=int(row["prompt_index"]),
            seed=int(row["seed"]),
            arm=row["arm"],
            a=int(row["a"]),
            b=int(row["b"]),
            expected=int(row["expected"]),
            completion=row["completion"],
            answer=int(row["answer"]) if row["answer"] else None,
            correct={"True": True, "False": False}[row["correct"]],
            num_tokens=int(row["num_tokens"]),
            time_ms=float(row["time_ms"]),
            outcomes=tuple((proposed, accepted) for proposed, accepted in json.loads(row["outcomes"])),
            answered_at=row["answered_at"],
        )


def read_answers(path: Path) -> list[Answer]:
    """The answers of a store in the order they were given; none where it does not exist.

    Raises:
        RunError: the file holds something else.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [Answer.from_row(row) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise RunError(f"{path} cannot be read as answers of earlier runs; remove it, or set resume=false") from error
