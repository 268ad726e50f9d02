"""Goodput: which requests count, and the ratio of both arms with its interval."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

from harness.engines.protocol import Answered
from harness.engines.requests import RequestError, RequestRecord
from harness.measuring.figures.goodput import Goodput, is_good
from harness.servers.settings import ServerSettings
from measured_runs import figures

SLO = {"ttft_ms": 100.0, "itl_ms": 20.0}


def request(first_s: float, step_s: float, tokens: int = 5) -> RequestRecord:
    arrivals = [first_s + step_s * number for number in range(tokens)]
    return RequestRecord(0, 1, arrivals=arrivals, num_tokens=tokens)


def lap(*requests: RequestRecord, seconds: float = 1.0) -> Answered:
    return Answered(requests=requests, seconds=seconds)


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


def goodput(*args: Any, slo: dict[str, float] = SLO) -> Any:
    """The figures of the last arm."""
    return figures(Goodput, *args, settings={"engine": ServerSettings(url="http://a/v1", slo=slo)})


def test_goodput_is_a_rate_and_a_share() -> None:
    laps = [lap(request(0.05, 0.01), request(0.2, 0.01)), lap(request(0.05, 0.01), seconds=3.0)]
    found = goodput(laps)
    assert (found.goodput, found.goodput_share) == (2 / 4, 2 / 3)
    assert goodput([]) == Goodput()


def test_tokens_that_came_together_have_no_time_between_them() -> None:
    together = RequestRecord(0, 1, arrivals=[0.05], num_tokens=2)
    in_pairs = RequestRecord(0, 1, arrivals=[0.05, 0.07], num_tokens=4)
    alone = request(0.05, 0.0, tokens=1)
    for laps in ([lap(together, request(0.05, 0.01))], [lap(in_pairs, alone)]):
        assert goodput(laps) == Goodput()
        assert goodput(laps, slo={"ttft_ms": 100.0}).goodput == 2
    assert goodput([lap(alone, request(0.05, 0.01))]).goodput_share == 1


def test_the_ratio_has_an_interval_over_laps() -> None:
    drawn = random.Random(0)
    slow = [lap(*(request(drawn.uniform(0.05, 0.15), 0.01) for _ in range(8))) for _ in range(20)]
    fast = [lap(*(request(0.05, 0.01) for _ in range(8)), seconds=0.5) for _ in range(20)]
    ratio = goodput(slow, fast).goodput_ratio
    assert ratio.estimate == pytest.approx(16 / goodput(slow).goodput)
    assert ratio.low < ratio.estimate < ratio.high


def test_nothing_good_has_no_ratio_and_few_laps_no_interval() -> None:
    late, early = [lap(request(0.2, 0.01))] * 9, [lap(request(0.05, 0.01))] * 9
    assert not goodput(late, early).goodput_ratio.is_known
    few = goodput(early[:3], early[:3]).goodput_ratio
    assert (few.estimate, few.has_bounds) == (1.0, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rare = goodput([*early, *late], early * 2).goodput_ratio
        alone = goodput([early[0], *late], early + early[:1]).goodput_ratio
    assert rare.has_bounds
    assert alone.estimate == 10.0
    assert alone.high > 50
    again = goodput(early, early, [0, 1, 2] * 3).goodput_ratio
    assert (again.estimate, again.has_bounds) == (1.0, False)
