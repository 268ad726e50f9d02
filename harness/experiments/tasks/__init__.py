"""Tasks of `eval`: questions with one right answer, a whole number. Each module here is one; its name is the setting.

A task is a module with a `TASK`; nothing else needs to know of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """A few-shot question about two whole numbers.

    Attributes:
        prompt: from both operands to what the model is asked; it goes on with the answer and ends the line.
        expected: the right answer.
        published: accuracies that others measured for operands from 1 to 99: model preset -> arm -> proportion.
    """

    prompt: Callable[[int, int], str]
    expected: Callable[[int, int], int]
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def load_task(name: str) -> Task:
    """The task of a name that `EvalSettings` let through."""
    task: Task = importlib.import_module(f"{__name__}.{name}").TASK
    return task
