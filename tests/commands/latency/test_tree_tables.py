"""The table of trees against chains at an equal budget."""

from __future__ import annotations

from typing import Any

import pytest

from harness.commands.latency.ranking.pairs import MeasuredPair
from harness.commands.latency.ranking.tree_tables import trees_tables
from harness.commands.latency.rows import LatencyPromptRow, LatencyRow
from harness.commands.names import Name
from harness.results.statistics.interval import Interval

NUM_PROMPTS = 10


class Measured:
    """A run of ten prompts of 60 tokens each, the last one of 6, of which some take an iteration more."""

    status = "ok"
    times = 1

    def __init__(self, num_iterations: int, ms: float) -> None:
        self.prompts = []
        for index in range(NUM_PROMPTS):
            is_short = index == NUM_PROMPTS - 1
            iterations = 1 if is_short else num_iterations + index % 3
            num_tokens = 6 if is_short else 60
            common: dict[str, Any] = {
                "prompt_index": index,
                "num_tokens": num_tokens,
                "unit": index,
            }
            self.prompts += [
                LatencyPromptRow(arm="regular", time_ms=600.0 + index, **common),
                LatencyPromptRow(
                    arm="speculative",
                    time_ms=60 * ms + index,
                    num_iterations=iterations,
                    tokens_per_iteration=num_tokens / iterations,
                    **common,
                ),
            ]


def measured(tree: str, number: int, budget: int, num_iterations: int, ms: float) -> MeasuredPair:
    settings = {"model": "m", "draft": "d", "temperature": 0.0, "batch_size": 1}
    row = LatencyRow(
        **settings,
        arm="speculative",
        num_draft_tokens=number,
        draft_tree=tree,
        draft_budget=budget,
        speedup=Interval(10 / ms),
        tokens_per_iteration=60 / num_iterations,
    )
    run: Any = Measured(num_iterations, ms)
    name = Name("m with d", number)
    return MeasuredPair(run, LatencyRow(**settings, arm="regular"), row, name)


def test_the_best_within_each_budget_is_compared() -> None:
    """A chain longer than the budget does not count, nor trees without a chain."""
    pairs = [
        measured("chain", 4, 16, 20, 5.0),
        measured("chain", 8, 16, 16, 6.0),
        measured("chain", 32, 16, 8, 9.0),
        measured("dynamic", 4, 8, 15, 5.0),
        measured("dynamic", 6, 16, 10, 4.0),
        measured("dynamic", 3, 16, 14, 4.0),
        measured("static", 6, 16, 12, 4.0),
    ]
    (table,) = trees_tables(pairs)
    found = [row.cells[:4] for row in table.rows]
    assert found == [
        (8, "chain", 8, 60 / 16),
        (8, "dynamic", 4, 60 / 15),
        (16, "chain", 8, 60 / 16),
        (16, "dynamic", 6, 60 / 10),
        (16, "static", 6, 60 / 12),
    ]
    over, bounds, faster = table.rows[3].cells[4], table.rows[3].cells[5], table.rows[3].cells[9]
    # All tokens count alike, as in the tokens per iteration beside it: the short answer hardly does.
    totals = [9 * number + 9 + 1 for number in (16, 10)]
    assert over == pytest.approx(totals[0] / totals[1])
    low, high = map(float, str(bounds).split(" to "))
    assert low < over < high
    assert faster == pytest.approx(1.5, rel=0.03)


def test_chains_alone_have_no_table() -> None:
    assert trees_tables([measured("chain", 4, 16, 20, 5.0)]) == []
    assert trees_tables([measured("dynamic", 4, 16, 20, 5.0)]) == []
