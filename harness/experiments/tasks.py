"""Tasks of `eval`: arithmetic problems with three solved examples. The value of the setting `task` is a name here."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from harness.results.published import MULTIPLICATION_ACCURACY


@dataclass(frozen=True)
class Task:
    """A few-shot question about two whole numbers; the model continues with the answer and ends the line.

    Attributes:
        prompt: from both operands to the text of the question.
        expected: from both operands to the correct answer.
        published: accuracies that others measured for operands from 1 to 99: model preset -> arm -> proportion.
    """

    prompt: Callable[[int, int], str]
    expected: Callable[[int, int], int]
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


TASKS: Mapping[str, Task] = {
    "addition": Task(
        prompt=lambda a, b: f"8 + 12 = 20\n25 + 4 = 29\n37 + 85 = 122\n{a} + {b} =",
        expected=operator.add,
    ),
    # The evaluation that came with llama-ssp.
    "multiplication": Task(
        prompt=lambda a, b: f"8 * 12 = 96\n25 * 4 = 100\n37 * 85 = 3145\n{a} * {b} =",
        expected=operator.mul,
        published=MULTIPLICATION_ACCURACY,
    ),
}
