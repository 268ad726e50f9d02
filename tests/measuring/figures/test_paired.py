"""Times of both arms in pairs: per prompt, batch or lap, and how small a difference they show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from harness.engines.protocol import Answered, BatchTimes
from harness.engines.requests import RequestError, RequestRecord
from harness.measuring.figures import paired
from harness.measuring.figures.paired import PairedTimes, SpeedupFigures
from harness.results.statistics.stopping import CONFIDENCE_OF_LOOKS
from measured_runs import figures, run_of


def request(
    index: int, seconds: float, failed: bool = False, num_tokens: int = 10
) -> RequestRecord:
    error = RequestError(500, "failed") if failed else None
    return RequestRecord(index, 3, seconds=seconds, num_tokens=num_tokens, error=error)


def lap(*requests: RequestRecord, sent: bool = True) -> Answered:
    batch = None if sent else BatchTimes(0.0, 0, 0)
    return Answered(arm="regular", seconds=2.0, requests=requests, batch=batch)


def arm(seconds: Sequence[float], sent: bool = True) -> list[Answered]:
    return [lap(request(index, each), sent=sent) for index, each in enumerate(seconds)]


def paired_times(regular: Sequence[Answered], other: Sequence[Answered]) -> PairedTimes:
    run = run_of(regular, other)
    return paired.paired_times(run, *run.arms.values())


def test_requests_of_a_lap_are_one_unit() -> None:
    regular = [lap(request(0, 1.0), request(1, 2.0)), lap(request(2, 4.0), request(3, 5.0))]
    # A request that failed in one arm counts in none; the second lap answered first.
    other = [lap(request(0, 0.5), request(1, 9.0, failed=True)), lap(request(3, 1), request(2, 1))]
    times = paired_times(regular, other)
    assert times.unit == "lap"
    # One answer was compared in the first lap, and two in the second, each of 10 tokens.
    assert (15 * times.regular).tolist() == pytest.approx([1000, 9000])
    assert (15 * times.speculative).tolist() == pytest.approx([500, 2000])
    assert times.lengths.tolist() == [20, 40]
    twice_as_long = paired_times(arm([1.0]), [lap(request(0, 1.0, num_tokens=20))])
    assert twice_as_long.regular / twice_as_long.speculative == pytest.approx(2)


def test_rows_of_a_batch_share_its_time() -> None:
    batches = [lap(request(0, 1.0), request(1, 2.0), sent=False)]
    times = paired_times(batches, batches)
    assert (times.unit, times.regular.tolist()) == ("batch", [200])


def test_prompts_and_arms_that_are_missing() -> None:
    assert paired_times(arm([1, 2], sent=False), arm([1], sent=False)).unit == "prompt"
    assert paired_times(arm([1, 2]), []).regular.size == 0


def test_units_with_the_same_prompts_cover_no_others() -> None:
    """A prompt that is asked again in its own unit is no such case."""
    laps = [lap(request(place % 4, 1.0), request(4, 1.0)) for place in range(8)]
    assert str(figures(SpeedupFigures, laps, laps).speedup.covers) == "8 laps of the same texts"
    again = [lap(request(place % 8, 1.0)) for place in range(16)]
    assert str(figures(SpeedupFigures, again, again, [*range(8)] * 2).speedup.covers) == "8 prompts"


def test_the_intervals_of_a_run_that_may_stop_are_wider() -> None:
    """Of the whole answers, and without their first tokens."""
    rng = np.random.default_rng(0)
    arms: list[list[Answered]] = [[], []]
    for index in range(12):
        for arm_answers, step_s in zip(arms, (0.1, 0.05), strict=True):
            seconds = 0.5 + 9 * step_s * rng.normal(1, 0.05)
            batch = BatchTimes(0.5, 1, 9)
            arm_answers.append(
                Answered(requests=[request(index, seconds)], seconds=seconds, batch=batch)
            )
    plain, wide = (
        figures(SpeedupFigures, *arms, confidence=confidence)
        for confidence in (0.95, CONFIDENCE_OF_LOOKS)
    )
    for name in ("speedup", "decode_speedup"):
        one, other = getattr(plain, name), getattr(wide, name)
        assert other.low < one.low < one.estimate == other.estimate < one.high < other.high
