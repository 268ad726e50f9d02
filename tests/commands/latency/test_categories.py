"""Speed-ups of parts of the prompts: of planted rows, whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from harness.commands.latency.tables.categories import by_category
from harness.measuring.rows import LatencyRow
from harness.results.rows.prompts import LatencyPromptRow

ROW = LatencyRow(arm="speculative", requests_per_second=1.0, batch_size=8)


def planted(rng: np.random.Generator, of_laps: float) -> list[LatencyPromptRow]:
    """8 laps of 8 requests that feel the same load; regular decoding takes twice as long.

    Args:
        of_laps: standard deviation of the logarithm of a lap's ratio of the arms.
    """
    prompts = []
    for lap in range(8):
        load = rng.normal(0, of_laps)
        for place in range(8):
            for arm, factor in (("regular", 2.0 * np.exp(load)), ("speculative", 1.0)):
                row = LatencyPromptRow(
                    prompt_index=8 * lap + place, arm=arm, category="all", unit=lap, num_tokens=10,
                    time_ms=100 * factor * np.exp(rng.normal(0, 0.02)),
                )  # fmt: skip
                prompts.append(row)
    return prompts


def test_requests_of_a_lap_are_not_independent() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(120):
        [category] = by_category(planted(rng, 0.1), ROW)
        assert category.speedup is not None
        covered += category.speedup.low <= 2 <= category.speedup.high
    # Over prompts it was 51 %.
    assert covered / 120 > 0.85
    assert str(category.speedup.covers) == "8 laps"


def test_fewer_than_eight_laps_have_no_interval() -> None:
    prompts = [row for row in planted(np.random.default_rng(0), 0.0) if row.unit != 7]
    [category] = by_category(prompts, ROW)
    assert category.speedup is not None
    assert category.speedup.estimate == pytest.approx(2, rel=0.05)
    assert not category.speedup.has_bounds


def test_a_category_is_over_all_of_its_tokens() -> None:
    prompts = []
    for index, length in enumerate([4, 256] * 4):
        for arm, step_ms in (("regular", 10), ("speculative", 5)):
            row = LatencyPromptRow(
                prompt_index=index, arm=arm, category="all", unit=index, num_tokens=length,
                time_ms=300 + step_ms * (length - 1),
            )  # fmt: skip
            prompts.append(row)
    [category] = by_category(prompts, ROW)
    assert category.speedup is not None
    assert category.speedup.estimate == pytest.approx((600 + 2580) / (600 + 1290))
    assert str(category.speedup.covers) == "8 prompts"
