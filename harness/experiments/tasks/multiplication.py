"""Products, three of them solved before the question: the evaluation that came with llama-ssp."""

from __future__ import annotations

import operator

from harness.experiments.tasks import Task
from harness.results.published import MULTIPLICATION_ACCURACY

TASK = Task(
    prompt=lambda a, b: f"8 * 12 = 96\n25 * 4 = 100\n37 * 85 = 3145\n{a} * {b} =",
    expected=operator.mul,
    published=MULTIPLICATION_ACCURACY,
)
