"""What is predicted of smaller K, also from noisy passes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from harness.commands.latency.tables.costs import predicted_by_k
from harness.commands.latency.tables.reason import reason
from harness.measuring.rows import LatencyRow

LENGTHS = [1.9, 2.7, 3.3, 3.8]


def rows(verify: float, draft: float = 0.0, **changes: Any) -> tuple[LatencyRow, LatencyRow]:
    """A run with K=4 whose target step takes 10 ms.

    Args:
        verify, draft: the cost of a verification and of a draft step, in target steps.
    """
    speculative: dict[str, Any] = {
        "num_draft_tokens": 4,
        "mean_proposed": 4.0,
        "mean_num_draft_tokens": 4.0,
        "draft_ms": 40 * draft,
        "verify_ms": 10 * verify,
        "tokens_per_iteration_by_num_draft_tokens": LENGTHS,
    }
    row = LatencyRow.from_values({"arm": "speculative"} | speculative | changes)
    return LatencyRow(arm="regular", target_step_ms=10.0), row


def predicted(*args: Any, **changes: Any) -> list[float]:
    return [figure.estimate for figure in predicted_by_k(*rows(*args, **changes)).values()]


def by_k(pair: tuple[LatencyRow, LatencyRow]) -> str | None:
    lines = dict(row.cells for table in reason(*pair) for row in table.rows)
    return lines.get("by K")


def test_smaller_k_are_predicted_with_the_passes_of_their_width() -> None:
    """Three tokens cost what one costs, and five twice as much: K=2 verifies for nothing, K=3 for half."""
    on_a_line = [1.9 / 1.25, 2.7 / 1.5, 3.3 / 1.75, 3.8 / 2]
    assert predicted(2.0) == pytest.approx(on_a_line)
    passes = [10.0, 10.0, 10.0, None, 20.0]
    timed = [1.9, 2.7, 3.3 / 1.5, 3.8 / 2]
    assert predicted(2.0, pass_ms_by_width=passes) == pytest.approx(timed)
    # Wider passes than a verification change nothing.
    assert predicted(2.0, pass_ms_by_width=[*passes, 60.0]) == pytest.approx(timed)


@pytest.mark.parametrize("passes", [[10, 9.9, None, None, 10.01], [10, 14, None, None, 10.1]])
def test_noise_of_flat_passes_does_not_move_the_prediction(passes: list[float | None]) -> None:
    """Whatever a smaller K verifies, it costs 1 to 1.05 steps: K=1 gains 1.65 to 1.73."""
    values = predicted(1.05, 0.1, pass_ms_by_width=passes)
    assert 1.9 / 1.15 - 1e-9 <= values[0] <= 1.9 / 1.1 + 1e-9
    assert values[3] == pytest.approx(3.8 / 1.45)


def test_the_verdict_costs_the_same_for_every_k() -> None:
    """Passes are flat, and a verification takes twice a step: so it does for K=1."""
    passes = [10.0, 10.0, 10.0, None, 10.0]
    assert predicted(2.0, pass_ms_by_width=passes) == pytest.approx([x / 2 for x in LENGTHS])


def test_no_prediction_is_impossible() -> None:
    drawn = random.Random(1)
    for _ in range(500):
        passes = [drawn.uniform(5, 30) if drawn.random() < 0.7 else None for _ in range(5)]
        pair = rows(drawn.uniform(0.5, 3), drawn.uniform(0, 0.3), pass_ms_by_width=passes)
        for k, figure in predicted_by_k(*pair).items():
            assert 0.4 < figure.estimate <= LENGTHS[k - 1]


def test_passes_that_contradict_each_other_predict_nothing() -> None:
    pair = rows(2.0, pass_ms_by_width=[10.0, 14.0, 16.0, None, 11.0])
    assert not predicted_by_k(*pair)
    assert by_k(pair) is None
    # Where a verification costs what a step does, no noise of its parts matters.
    assert predicted_by_k(*rows(1.1, pass_ms_by_width=[10, 14, 16, None, 11]))
    assert predicted_by_k(*rows(2.0, pass_ms_by_width=[10, 14, 13, None, 15]))


def test_no_token_of_a_block_is_tested_by_itself() -> None:
    tested: dict[str, Any] = {
        "acceptance_rate": 0.6,
        "conditional_acceptance_rate": 0.8,
        "acceptance_by_position": [0.9, 0.8, 0.7, 0.6],
    }
    assert "of those tested there" in str(reason(*rows(1.2, **tested)))
    assert "of those tested there" not in str(reason(*rows(1.2, rule="block", **tested)))
