"""Goodput: which requests count, and the ratio of both arms with its interval."""

from __future__ import annotations

import random
import warnings

import pytest

from harness.commands.latency.figures.goodput import goodput_columns, goodput_ratio_columns, is_good
from harness.engines.requests import RequestError, RequestRecord
from harness.engines.timing import Generation

SLO = {"ttft_ms": 100.0, "itl_ms": 20.0}


def request(first_s: float, step_s: float, tokens: int = 5) -> RequestRecord:
    arrivals = [first_s + step_s * number for number in range(tokens)]
    return RequestRecord(0, 1, arrivals=arrivals, num_tokens=tokens)


def lap(*requests: RequestRecord, seconds: float = 1.0) -> Generation:
    return Generation("regular", requests=requests, seconds=seconds, sent=True)


def test_both_times_must_hold() -> None:
    assert is_good(request(0.05, 0.01), SLO)
    assert not is_good(request(0.11, 0.01), SLO)
    assert not is_good(request(0.05, 0.03), SLO)
    assert is_good(request(0.05, 0.03), {"ttft_ms": 100.0})
    assert is_good(request(0.05, 0.0, tokens=1), SLO)


def test_a_failed_request_is_not_good() -> None:
    failed = request(0.05, 0.01)
    failed.error = RequestError(500, "x", "y")
    assert not is_good(failed, SLO)


def test_goodput_is_a_rate_and_a_share() -> None:
    laps = [lap(request(0.05, 0.01), request(0.2, 0.01)), lap(request(0.05, 0.01), seconds=3.0)]
    assert goodput_columns(laps, SLO) == {"goodput": 2 / 4, "goodput_share": 2 / 3}
    assert goodput_columns([], SLO) == {}


def test_the_ratio_has_an_interval_over_laps() -> None:
    drawn = random.Random(0)
    slow = [lap(*(request(drawn.uniform(0.05, 0.15), 0.01) for _ in range(8))) for _ in range(20)]
    fast = [lap(*(request(0.05, 0.01) for _ in range(8)), seconds=0.5) for _ in range(20)]
    columns = goodput_ratio_columns(slow, fast, range(20), SLO, 1000, 0)
    good = goodput_columns(slow, SLO)["goodput"]
    assert columns["goodput_ratio"] == pytest.approx(16 / good)
    assert columns["goodput_ratio_low"] < columns["goodput_ratio"] < columns["goodput_ratio_high"]


def test_nothing_good_has_no_ratio_and_few_laps_no_interval() -> None:
    late, early = [lap(request(0.2, 0.01))] * 9, [lap(request(0.05, 0.01))] * 9
    assert set(goodput_ratio_columns(late, early, range(9), SLO, 100, 0).values()) == {None}
    few = goodput_ratio_columns(early[:3], early[:3], range(3), SLO, 100, 0)
    assert (few["goodput_ratio"], few["goodput_ratio_low"]) == (1.0, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rare = goodput_ratio_columns([*early, *late], early * 2, range(18), SLO, 100, 0)
        alone = goodput_ratio_columns([early[0], *late], early + early[:1], range(10), SLO, 100, 0)
    assert rare["goodput_ratio_low"] is not None
    assert (alone["goodput_ratio"], alone["goodput_ratio_low"]) == (10.0, None)
    again = goodput_ratio_columns(early, early, [0, 1, 2] * 3, SLO, 100, 0)
    assert (again["goodput_ratio"], again["goodput_ratio_low"]) == (1.0, None)
