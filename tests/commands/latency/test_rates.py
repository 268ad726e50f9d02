"""Tokens per second with intervals, of one reader and in all."""

from __future__ import annotations

import random

import pytest

from harness.commands.latency.figures.rates import rate_columns
from harness.engines.requests import RequestError, RequestRecord
from harness.engines.timing import Generation


def batch(seconds: float, *tokens: int) -> Generation:
    requests = [RequestRecord(row, 1, num_tokens=number) for row, number in enumerate(tokens)]
    return Generation("regular", requests=requests, seconds=seconds)


def test_both_rates_lie_within_their_intervals() -> None:
    drawn = random.Random(0)
    batches = [batch(drawn.uniform(1.0, 1.2), 10, 10) for _ in range(30)]
    columns = rate_columns(batches, range(30), 1000, 0)
    in_all = 20 * 30 / sum(one.seconds for one in batches)
    assert columns["tokens_per_second_low"] < in_all < columns["tokens_per_second_high"]
    low, high = (columns[f"tokens_per_second_per_user_{end}"] for end in ("low", "high"))
    assert low < in_all / 2 < high
    assert high - low < 0.1 * low


def test_repetitions_of_a_unit_are_no_further_units() -> None:
    batches = [batch(1.0 + 0.1 * number, 10) for number in range(7)]
    assert set(rate_columns(batches * 2, [*range(7)] * 2, 100, 0).values()) == {None}


def test_what_failed_is_left_out() -> None:
    failed = RequestRecord(1, 1, seconds=9.0, num_tokens=5, error=RequestError(500, "x", "y"))
    good = RequestRecord(0, 1, seconds=1.0, num_tokens=10)
    laps = [Generation("regular", requests=[good, failed], seconds=1.0, sent=True)] * 9
    nothing = Generation("regular", requests=[failed], seconds=2.0, sent=True)
    columns = rate_columns([*laps, nothing], range(10), 100, 0)
    assert columns["tokens_per_second_low"] == pytest.approx(10)
    assert columns["tokens_per_second_per_user_high"] == pytest.approx(10)
    assert set(rate_columns([], [], 100, 0).values()) == {None}
