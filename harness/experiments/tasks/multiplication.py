"""Products, three of them solved before the question: the evaluation that came with llama-ssp."""

from __future__ import annotations

import operator

from harness.experiments.tasks import Task

TASK = Task(
    prompt=lambda a, b: f"8 * 12 = 96\n25 * 4 = 100\n37 * 85 = 3145\n{a} * {b} =",
    expected=operator.mul,
    # llama-ssp's README: seeds 0 to 3 with 1000 questions each, ± 1.4 (7B) and ± 1.5 percentage points.
    published={
        "7B": {"regular": 0.284, "speculative": 0.281},
        "13B": {"regular": 0.429, "speculative": 0.431},
        "30B": {"regular": 0.501, "speculative": 0.496},
    },
)
