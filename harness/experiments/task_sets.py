"""Tasks of `eval` whose questions come from data sets: how a row becomes a prompt, how the answer
is read from a completion, and which answers are equal.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.errors import SettingError
from harness.config.settings import PromptSettings
from harness.experiments.encoding import origin
from harness.experiments.prompt_files import BadFile, local_files, read_rows
from harness.experiments.tasks import Judgement, Problem, Task, draw_rows
from harness.menu.names import prompt_preset

# The first rows of the training part, as in lm-evaluation-harness.
_NUM_EXAMPLES = 5
_GSM8K_EXAMPLES = "main/train-00000-of-00001.parquet"
_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_MATH_PROMPT = (
    "Solve this problem step by step. Write the final answer within \\boxed{{}}.\n\n"
    "Problem: {problem}\n\nSolution:"
)
# Patterns of what changes how a formula looks and not its value, with what replaces them.
_LOOKS = (
    # \left( 1, 2 \right) -> (1, 2), but not the second backslash of a row break.
    (re.compile(r"(?<!\\)\\(?:(?:left|right|displaystyle)(?![a-zA-Z])|[!,;: ])"), ""),
    # \dfrac12 -> \frac12
    (re.compile(r"\\(d|t)frac"), r"\\frac"),
    # \text{east} -> east
    (re.compile(r"\\(text|mathrm|mbox)\{([^{}]*)\}"), r"\2"),
    # 90^\circ -> 90, \$5 -> 5, 5\% -> 5
    (re.compile(r"\^\{?\\circ\}?|\\\$|\$|\\%|%"), ""),
    # \frac12 -> \frac{1}{2}
    (re.compile(r"\\frac(\d)(\d)"), r"\\frac{\1}{\2}"),
    # Any space.
    (re.compile(r"\s"), ""),
)
_GROUPED = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class SetTask(Task):
    """A task whose questions are rows of a data set.

    Attributes:
        preset: of the prompt set.
        columns: that a row must have.
        beginning: makes what every prompt begins with, from the settings of the set.
        prompt: makes the text of the question from a row.
        expected: reads the correct answer from a row; None if there is none.
        read: reads from a completion its part that counts, and the answer in it; None if there is
            none.
        normal: makes equal answers the same text, such as 5 from 5.00.
    """

    preset: str
    columns: tuple[str, ...]
    beginning: Callable[[PromptSettings], str]
    prompt: Callable[[Mapping[str, Any]], str]
    expected: Callable[[Mapping[str, Any]], str | None]
    read: Callable[[str], tuple[str, str | None]]
    normal: Callable[[str], str]

    @property
    def settings(self) -> PromptSettings:
        """Where the questions are."""
        return prompt_preset(self.preset)

    @property
    def origin(self) -> str | None:
        return origin(self.settings)

    def problems(self, seed: int, count: int) -> list[Problem]:
        settings = self.settings
        rows = rows_of(settings, self.columns, f"task={self.preset}")
        places = draw_rows(
            source=f"the data set {settings.name}", num_rows=len(rows), seed=seed, count=count
        )
        beginning = self.beginning(settings)
        problems = []
        for index, place in enumerate(places):
            expected = self.expected(rows[place])
            if expected is None:
                raise SettingError(
                    "task", f"row {place + 1} of its file has no answer", self.preset
                )
            prompt = beginning + self.prompt(rows[place])
            problems.append(
                Problem(
                    seed, index, a=None, b=None, expected=expected, prompt=prompt, source_row=place
                )
            )
        return problems

    def judge(self, text: str, problem: Problem) -> Judgement:
        completion, answer = self.read(text)
        return Judgement(completion, answer, self.is_correct(answer, problem.expected))

    def is_correct(self, answer: str | None, expected: str) -> bool:
        """Whether an answer is the expected one."""
        return answer is not None and self.normal(answer) == self.normal(expected)


def rows_of(settings: PromptSettings, columns: Sequence[str], task: str) -> list[Mapping[str, Any]]:
    """The rows of a data set's file, all of which have these columns.

    Args:
        task: the setting that led to this data set, for errors: `task=gsm8k`.
    """
    (path,) = local_files(settings, task)
    try:
        rows = [row for _, row in read_rows(path, settings.source)]
        for number, row in enumerate(rows, start=1):
            missing = [column for column in columns if not row.get(column)]
            if missing:
                raise BadFile(f"row {number} has no {missing[0]}; it has {', '.join(row)}")
    except BadFile as bad:
        raise SettingError("task", str(bad), settings.file) from bad
    return rows


def _gsm8k_question(row: Mapping[str, Any]) -> str:
    return f"Question: {row['question']}\nAnswer:"


def _gsm8k_examples(settings: PromptSettings) -> str:
    training = dataclasses.replace(settings, file=_GSM8K_EXAMPLES)
    rows = rows_of(training, ("question", "answer"), "task=gsm8k")[:_NUM_EXAMPLES]
    return "".join(f"{_gsm8k_question(row)} {row['answer']}\n\n" for row in rows)


def gsm8k_answer(completion: str) -> tuple[str, str | None]:
    """A solution up to where the next question begins, and the number behind `####`."""
    solution = completion.partition("Question:")[0]
    match = _GSM8K_ANSWER.search(solution)
    return solution.rstrip(), None if match is None else plain_number(match[1])


def plain_number(text: str) -> str:
    """A number without commas, without a point at its end, and without `.00`: `1,234.00.` ->
    `1234`.
    """
    return text.replace(",", "").rstrip(".").removesuffix(".00")


def boxed_answer(completion: str) -> tuple[str, str | None]:
    r"""A solution up to where the next problem begins, and what is in its last `\boxed{}`."""
    solution = completion.partition("\nProblem:")[0].rstrip()
    _, box, boxed = solution.rpartition("\\boxed{")
    if not box:
        return solution, None
    depth = 1
    for place, character in enumerate(boxed):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return solution, boxed[:place].strip() or None
    return solution, None


def normal_formula(answer: str) -> str:
    """A formula without anything that changes only how it looks."""
    for pattern, replacement in _LOOKS:
        answer = pattern.sub(replacement, answer)
    answer = answer.rstrip(".")
    # Commas group digits in a number, and separate the parts of a pair.
    return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer


SETS: Mapping[str, SetTask] = {
    # Cobbe et al. 2021, with the prompt and the strict reading of lm-evaluation-harness's `gsm8k`.
    "gsm8k": SetTask(
        preset="gsm8k",
        columns=("question", "answer"),
        beginning=_gsm8k_examples,
        prompt=_gsm8k_question,
        expected=lambda row: gsm8k_answer(row["answer"])[1],
        read=gsm8k_answer,
        normal=plain_number,
    ),
    # Without examples, as it is usual for models that follow instructions.
    "math500": SetTask(
        preset="math500",
        columns=("problem", "answer"),
        beginning=lambda settings: "",
        prompt=lambda row: _MATH_PROMPT.format(problem=row["problem"]),
        expected=lambda row: str(row["answer"]),
        read=boxed_answer,
        normal=normal_formula,
    ),
}
