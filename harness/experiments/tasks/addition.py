"""Sums, three of them solved before the question."""

from __future__ import annotations

import operator

from harness.experiments.tasks import Task

TASK = Task(prompt=lambda a, b: f"8 + 12 = 20\n25 + 4 = 29\n37 + 85 = 122\n{a} + {b} =", expected=operator.add)
