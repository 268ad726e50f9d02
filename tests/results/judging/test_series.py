"""What is said of several runs over the same regular measurement, from planted rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.measuring.rows import LatencyRow
from harness.results.judging.series import Member, series_of
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL
from harness.results.statistics.ratios import ratio_of_totals
from report_files import latency_run

Floats = NDArray[np.float64]
NUM_PROMPTS = 15


def timed_run(draft: str, regular: Floats, speculative: Floats, **changes: Any) -> Run[LatencyRow]:
    """A run with these milliseconds of each prompt, one token each."""
    speedup = ratio_of_totals([regular], [speculative])
    columns = {"speedup_low": speedup.low, "speedup_high": speedup.high, **changes}
    columns["speedup_covers"] = {"num_units": NUM_PROMPTS, "unit": "prompt"}
    run = Run(latency_run(draft=draft, speedup=speedup.estimate, **columns))
    run.prompt_rows = [
        LatencyPromptRow(
            run=run.id, prompt_index=index, prompt_place=index, arm=arm, num_tokens=1, time_ms=time
        )
        for arm, times in (("regular", regular), ("speculative", speculative))
        for index, time in enumerate(times)
    ]
    return run


def standings(runs: Sequence[Run[LatencyRow]]) -> dict[str, Member]:
    (series,) = series_of(runs)
    return {str(member.run.last.draft): member for member in series.members}


def test_others_are_said_relative_to_the_run_that_is_named() -> None:
    """A pays surely; B is faster on most prompts and stalls on three; C gains nothing."""
    regular = np.random.default_rng(0).normal(100, 1, NUM_PROMPTS)
    unsure = np.full(NUM_PROMPTS, 45.0)
    unsure[:3] = [160.0, 175.0, 190.0]
    members = standings(
        [
            timed_run("A", regular, regular / 1.2),
            timed_run("B", regular, unsure),
            timed_run("C", regular, regular * np.linspace(0.999, 1.001, NUM_PROMPTS)),
        ]
    )
    best, rival, nothing = members["A"], members["B"], members["C"]
    assert best.standing is None
    assert best.verdict.pays
    assert rival.speedup > best.speedup
    assert rival.standing.relation == "open"
    assert nothing.standing.relation == "below"
    statements = [said for member in members.values() for said in member.statements]
    assert {said.family for said in statements} == {3}
    assert not any(said.why for said in statements)
    assert nothing.standing.reference is best.run.last
    assert nothing.standing.interval.estimate == pytest.approx(1 / 1.2, rel=0.01)
    assert nothing.standing.interval.high < 0.85


def test_runs_over_the_same_regular_measurement_are_a_series() -> None:
    for changes, is_same in [
        ({"draft": "1B", "num_draft_tokens": 8}, True),
        ({"rule": "block", "placement": "cpu"}, True),
        ({"settings": {"draft.sampling": "greedy", "engine.acceptance": 0.5}}, True),
        ({"settings": {"vary.pmin": 0.5}}, True),
        ({"settings": {"engine.first_ms": 200.0}}, False),
        ({"num_prompts": 8}, False),
        ({"repository": "other/13B"}, False),
        ({"prompts_digest": "ba9876543210"}, False),
        ({"batch_size": 4}, False),
        ({"temperature": 0.0}, False),
        ({"devices": "NVIDIA H100"}, False),
        ({"server_command": ["vllm A", "vllm A -d"]}, False),
    ]:
        runs = [Run(latency_run()), Run(latency_run(**changes))]
        assert len(series_of(runs)) == (1 if is_same else 2)


def test_a_busy_run_is_not_ranked_and_others_are_still_compared_prompt_by_prompt() -> None:
    regular = np.random.default_rng(0).normal(100, 1, NUM_PROMPTS)
    jitter = np.linspace(0.99, 1.01, NUM_PROMPTS)
    runs = [timed_run("A", regular, regular / 1.5)]
    runs.append(timed_run("B", regular, regular / 1.48 * jitter))
    runs.append(timed_run("busy", regular, regular / 3, processor_share=0.5))
    members = standings(runs)
    assert members["busy"].standing.why == "drift or a busy machine"
    figures = {"status": "interrupted", "ms_per_token": 50.0}
    [part] = standings([timed_run("part", regular, regular / 3, **figures)]).values()
    assert part.speedup is None
    share = members["B"].standing.interval
    assert share.estimate == pytest.approx(1.48 / 1.5, rel=0.01)
    # Their own intervals overlap by more than this.
    assert share.high - share.low < 0.02


@pytest.mark.parametrize(
    ("gains", "is_best"),
    [((1.2, 1.0), True), ((1.2, 1.2), False), ((1.0, 0.8), False), ((0.9, 0.8), False)],
)
def test_the_best_pays_and_all_others_gain_less(gains: Sequence[float], is_best: bool) -> None:
    regular = np.random.default_rng(0).normal(100, 1, NUM_PROMPTS)
    jitter = np.linspace(0.99, 1.01, NUM_PROMPTS)
    times = [regular / gain * jitter[:: (-1) ** number] for number, gain in enumerate(gains)]
    runs = [timed_run(str(number), regular, quicker) for number, quicker in enumerate(times)]
    (series,) = series_of(runs)
    assert series.is_reference_best == is_best


@pytest.mark.parametrize(
    ("num_prompts", "factor", "words"),
    [
        # Both runs have the same prompts, and the fewest that an interval needs.
        (FEWEST_FOR_INTERVAL, 1.03, "gains less"),
        # Intervals of both runs overlap, or do not.
        (FEWEST_FOR_INTERVAL - 1, 1.03, "not significantly different"),
        (FEWEST_FOR_INTERVAL - 1, 1.5, "gains less"),
    ],
)
def test_without_common_prompts_intervals_decide(
    num_prompts: int, factor: float, words: str
) -> None:
    regular = np.full(NUM_PROMPTS, 100.0)
    quicker = regular / np.linspace(1.8, 2.2, NUM_PROMPTS)
    first = timed_run("first", regular, quicker)
    second = timed_run("second", regular, quicker * factor)
    rows = second.prompt_rows
    second.prompt_rows = [row for row in rows if (row.prompt_index or 0) < num_prompts]
    standing = standings([first, second])["second"].standing
    assert (standing.words, standing.why) == (words, "")
    assert standing.interval.low <= 1 / factor <= standing.interval.high
    assert standing.interval.estimate == pytest.approx(1 / factor)


def test_of_twelve_equal_members_none_is_called_the_best() -> None:
    """Over 80 pages of fresh seeds, in at most 5 % any gains less."""
    rng = np.random.default_rng(106)
    wrong = 0
    for _ in range(80):
        regular = rng.lognormal(4, 0.4, NUM_PROMPTS)
        runs = []
        for number in range(12):
            own = np.exp(rng.normal(0, 0.1, NUM_PROMPTS))
            runs.append(timed_run(str(number), regular, regular / 1.5 * own))
        (series,) = series_of(runs)
        wrong += any(standing.is_conclusion for standing in series.standings)
    assert wrong / 80 <= 0.05
