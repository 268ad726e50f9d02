"""The table of trees against chains at an equal budget, from files as `latency` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.commands.latency.rows import LatencyPromptRow
from harness.commands.report.command import build
from harness.results.files import append_rows
from harness.tables.table import Table
from report_files import latency_run

NUM_PROMPTS = 10


def measure(
    directory: Path, tree: str, number: int, budget: int, num_iterations: int, ms: float
) -> None:
    """Write a run of ten prompts of 60 tokens each, the last one of 6, of which some take an iteration more."""
    run = latency_run(
        number,
        10 / ms,
        draft_tree=tree,
        draft_budget=budget,
        tokens_per_iteration=60 / num_iterations,
    )
    prompts = []
    for index in range(NUM_PROMPTS):
        is_short = index == NUM_PROMPTS - 1
        iterations = 1 if is_short else num_iterations + index % 3
        num_tokens = 6 if is_short else 60
        common: dict[str, Any] = {
            "run": run[0].run,
            "prompt_index": index,
            "num_tokens": num_tokens,
            "unit": index,
        }
        further = {"num_iterations": iterations, "tokens_per_iteration": num_tokens / iterations}
        prompts += [
            LatencyPromptRow(arm="regular", time_ms=600.0 + index, **common),
            LatencyPromptRow(arm="speculative", time_ms=60 * ms + index, **common, **further),
        ]
    append_rows(directory / "latency.csv", run)
    append_rows(directory / "latency_prompts.csv", prompts)


def tables(directory: Path) -> list[Table]:
    parts = build([directory]).parts
    return [part for part in parts if isinstance(part, Table) and part.key.startswith("trees")]


def test_the_best_within_each_budget_is_compared(tmp_path: Path) -> None:
    """A chain longer than the budget does not count, nor trees without a chain."""
    measure(tmp_path, "chain", 4, 16, 20, 5.0)
    measure(tmp_path, "chain", 8, 16, 16, 6.0)
    measure(tmp_path, "chain", 32, 16, 8, 9.0)
    measure(tmp_path, "dynamic", 4, 8, 15, 5.0)
    measure(tmp_path, "dynamic", 6, 16, 10, 4.0)
    measure(tmp_path, "dynamic", 3, 16, 14, 4.0)
    measure(tmp_path, "static", 6, 16, 12, 4.0)
    (table,) = tables(tmp_path)
    found = [row.cells[:4] for row in table.rows]
    assert found == [
        (8, "chain", 8, 60 / 16),
        (8, "dynamic", 4, 60 / 15),
        (16, "chain", 8, 60 / 16),
        (16, "dynamic", 6, 60 / 10),
        (16, "static", 6, 60 / 12),
    ]
    over, bounds, faster = (table.shown()[1][3][place] for place in (4, 5, 9))
    # All tokens count alike, as in the tokens per iteration beside it: the short answer hardly does.
    totals = [9 * number + 9 + 1 for number in (16, 10)]
    assert float(over.rstrip("×")) == pytest.approx(totals[0] / totals[1], abs=0.005)
    low, high = map(float, bounds.split(" to "))
    assert low < totals[0] / totals[1] < high
    assert float(faster.rstrip("×")) == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_one_kind_alone_has_no_table(tmp_path: Path, tree: str) -> None:
    measure(tmp_path, tree, 4, 16, 20, 5.0)
    assert tables(tmp_path) == []
