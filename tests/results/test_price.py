"""The price of an iteration: what it predicts, what it refuses, and which curves it calls a line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from harness.config.errors import SettingError
from harness.results.price.shape import Point, StartNoise, shape_of
from harness.results.price.table import read_table
from harness.results.price.value import IterationCost, mean_time
from harness.results.statistics.interval import Coverage, Interval, t_quantile


def cost_of(
    points: Iterable[tuple[int, int, float | Interval]],
    source: str = "",
    refused: Mapping[int, str] | None = None,
) -> IterationCost:
    """A price of times, of which numbers have no bounds."""
    times = [
        (width, rows, ms if isinstance(ms, Interval) else Interval(ms))
        for width, rows, ms in points
    ]
    return IterationCost.from_points(times, source, refused or {})


def line_of(cost: IterationCost, rows: int = 1) -> tuple[float, float, float]:
    """Its beginning, its slope, and how far that may be off."""
    shape = cost.shape(rows)
    assert str(shape.fixed.covers) == str(shape.per_token.covers)
    slope = shape.per_token
    return shape.fixed.estimate, slope.estimate, slope.high - slope.estimate


def test_a_prediction_is_tokens_over_regular_steps() -> None:
    """K=4: 30 ms, 1.5 steps, and 3 tokens in the time of 1.5: 2×."""
    cost = cost_of([(1, 1, 20.0), (5, 1, 30.0), (9, 1, 60.0)])
    assert cost.at(4).steps.estimate == pytest.approx(1.5)
    assert cost.speedup(Interval(3.0), 4).estimate == pytest.approx(2)
    assert not cost.speedup(Interval(3.0), 4).has_bounds
    assert cost.speedup(Interval(0.0, 0.0, 0.1), 4).estimate == 0


def test_both_parts_widen_the_interval() -> None:
    covers = Coverage(15, "prompt")
    known = Interval(1.5, 1.5, 1.5, covers)
    cost = cost_of([(1, 1, 20.0), (5, 1, Interval(30, 27, 33, covers))])
    tokens = Interval(3.0, 2.8, 3.2, Coverage(40, "prompt"))
    found = cost.speedup(tokens, 4)
    of_cost, of_tokens = math.log(33 / 30), math.log(3 / 2.8)
    assert math.log(found.estimate / found.low) == pytest.approx(math.hypot(of_cost, of_tokens))
    above = math.hypot(math.log(30 / 27), math.log(3.2 / 3))
    assert found.high == pytest.approx(found.estimate * math.exp(above))
    assert (
        found.low
        < cost.speedup(Interval(3.0), 4).low
        < 2
        < cost.speedup(Interval(3.0), 4).high
        < found.high
    )
    assert str(found.covers) == "15 prompts"
    exact = cost_of([(1, 1, Interval(20, 20, 20, covers)), (5, 1, known)])
    assert exact.speedup(Interval(3.0), 4).low == exact.speedup(Interval(3.0), 4).high


@pytest.mark.parametrize(
    ("k", "rows", "complaint"),
    [
        (6, 1, "has no price of K=6 with 1 in flight, but of K=2, 4: measure K=6"),
        (4, 2, "has no price with 2 in flight, but with 1, 8 in flight: measure batch_size=2"),
        (4, 8, "has no price with 8 in flight: answers take 1.9 times as long"),
    ],
)  # fmt: skip
def test_nothing_is_extrapolated(k: int, rows: int, complaint: str) -> None:
    points = [(1, 1, 20.0), (3, 1, 25.0), (5, 1, 30.0), (1, 8, 20.0), (5, 8, 40.0)]
    queued = {8: "has no price with 8 in flight: answers take 1.9 times as long as decoding them"}
    cost = cost_of(points, refused=queued)
    with pytest.raises(SettingError, match="costs") as refused:
        cost.speedup(Interval(2.0), k, rows)
    assert complaint in str(refused.value)
    # Where one load has prices it needs no name.
    alone = cost_of(points[:3])
    with pytest.raises(SettingError, match="K=6, but of K=2, 4: measure K=6"):
        alone.at(6)
    with pytest.raises(SettingError, match="no price with 2 in flight, but with 1 in flight"):
        alone.at(4, 2)


def test_a_load_that_is_refused_has_its_figures_but_no_price() -> None:
    points = [(1, 1, 20.0), (5, 1, 25.6), (5, 1, 40.0), (1, 8, 25.0), (5, 8, 40.0)]
    points += [(2, 4, 9.0), (1, 16, 50.0)]
    cost = cost_of(points, refused={8: "queued"})
    assert (cost.point(4).steps.estimate, cost.point(4, 8).steps.estimate) == pytest.approx(
        (1.6, 1.6)
    )
    assert cost.point(0).steps.estimate == 1
    assert (cost.point(0).ms.estimate, cost.point(0, 8).ms.estimate) == (20, 25)
    absent = cost.point(3).steps, cost.point(0, 2).ms, cost.point(1, 4).steps
    assert not any(one.is_known for one in absent)
    assert (cost.loads, cost.ks(), cost.ks(4)) == ([1, 4, 8], [4], [])
    read = IterationCost.from_steps({4: 1.25, 1: 1.0625, 2: 1.125})
    assert read.at(4).steps.estimate == 1.25
    assert line_of(read)[:2] == pytest.approx((1, 1 / 16))


def test_starts_that_differ_widen_the_slope_of_widths_that_were_started_once() -> None:
    """1.5 ms within a start and 2 % of 100 ms between starts are 2.5 ms; by Satterthwaite, with 8.956 degrees."""
    half = 1.5 * stats.t.isf(0.025, 14)
    for num_runs, error in ((None, math.hypot(2.5, 2.5)), (5, math.hypot(2.5, 1.5))):
        once, other = (
            Point(width, 1, Interval(100, 100 - half, 100 + half, covers))
            for width, covers in (
                (2, Coverage(15, "prompt")),
                (3, Coverage(15, "prompt", num_runs=num_runs)),
            )
        )
        shape = shape_of([once, other], StartNoise(0.02, 4))
        assert shape.per_token.high == pytest.approx(stats.t.isf(0.025, 8.956) * error, rel=1e-3)
    assert StartNoise.of([20, 20 * math.exp(0.02)]) == pytest.approx((0.02 / math.sqrt(2), 1))
    assert StartNoise.of([20.0]).share == 0.02


@pytest.mark.parametrize(
    ("half", "bend", "is_line"),
    [(1.0, 2.44, True), (1.0, 2.46, False), (0.01, 1.19, True), (0.01, 1.21, False)],
)
def test_three_points_are_a_line_but_for_noise_or_two_percent(
    half: float, bend: float, is_line: bool
) -> None:
    """Their second difference has √6 times the error of one, and a third of it is how far the middle one is off."""
    covers = Coverage(15, "prompt")
    times = [20 + bend / 2, 20.0, 20 + bend / 2]
    points = [
        Point(width, 1, Interval(ms, ms - half, ms + half, covers))
        for width, ms in enumerate(times, start=2)
    ]
    shape = shape_of(points)
    assert (shape.fixed is not None, shape.tested) == (is_line, True)


def test_two_points_are_a_line_that_nobody_tested() -> None:
    covers = Coverage(15, "prompt")
    points = [(width, 1, Interval(ms, ms - 1, ms + 1, covers)) for width, ms in ((3, 25), (9, 40))]
    shape = cost_of(points).shape()
    assert (shape.fixed is not None, shape.tested) == (True, False)
    assert cost_of([(1, 1, 20.0), (5, 1, 30.0)]).shape() is None


def test_passes_in_rounds_have_the_median_of_their_ratios() -> None:
    """Of 11 rounds, one of which stalls. The bounds are the 2nd and the 10th in order: the sign test's at 95 %."""
    ratios = [1.0 + place / 10 for place in range(11)]
    rounds = [{1: 10.0, 3: 10.0 * ratio, 5: 50.0} for ratio in ratios]
    cost = IterationCost.from_passes([*rounds[:-1], {1: 10.0, 3: 900.0, 5: 50.0}], "passes")
    steps = cost.at(2).steps
    assert (steps.low, steps.estimate, steps.high) == pytest.approx((1.1, 1.5, 1.9))
    three = [{1: 10.0, 3: ms} for ms in (12.0, 14.0, 19.0)]
    few = IterationCost.from_passes(three, "passes").at(2).ms
    assert (few.low, few.estimate, few.high, str(few.covers)) == (12, 14, 19, "3 rounds")
    assert cost.at(2).ms.estimate == pytest.approx(15.0)
    assert cost.at(4).steps.estimate == pytest.approx(5.0)
    low, high = stats.binomtest(1, 11).pvalue, stats.binomtest(2, 11).pvalue
    assert low < 0.05 < high


def test_without_a_regular_step_nothing_is_predicted() -> None:
    cost = cost_of([(3, 1, 25.0)])
    with pytest.raises(SettingError, match="has no regular step: measure one"):
        cost.speedup(Interval(2.0), 2)
    assert cost.ks() == []


def test_the_value_survives_a_file() -> None:
    covers = Coverage(15, "prompt")
    times = [(1, 1, Interval(20.0, 19.0, 21.0, covers)), (5, 1, 30.0)]
    cost = cost_of(times, "here", {4: "queued"})
    last = replace(cost.points[-1], num_drafted=3.5, answer_length=120.5)
    cost = replace(cost, points=(cost.points[0], last), one_step=False)
    assert repr(IterationCost.from_json(cost.as_json())) == repr(cost)
    with pytest.raises(ValueError, match="is of version 7"):
        IterationCost.from_json(cost.as_json() | {"version": 7})
    for ms in (0.0, math.inf):
        damaged = {"width": 1, "rows": 1, "ms": {"estimate": ms}, "steps": None}
        with pytest.raises(ValueError, match="a time is not positive"):
            IterationCost.from_json({"version": 1, "points": [damaged]})


def test_repeated_measurements_cover_what_differs_between_them() -> None:
    covers = Coverage(15, "prompt")
    factors = (1 / 1.05, 1.0, 1.05)
    several = [Interval(30 * factor, 29.9 * factor, 30.1 * factor, covers) for factor in factors]
    mean = mean_time(several)
    assert mean.estimate == pytest.approx(30)
    assert str(mean.covers) == "15 prompts and 3 runs"
    # Student's t of two degrees of freedom at 95 % is 4.303; the three deviate by 5 %.
    factor = 1.05 ** (4.303 / math.sqrt(3))
    assert (mean.low, mean.high) == pytest.approx((30 / factor, 30 * factor), rel=1e-4)
    alike = mean_time([Interval(30, 29, 33), Interval(30, 28, 34)])
    below, above = (
        math.hypot(math.log(one), math.log(other)) / 2
        for one, other in ((30 / 29, 30 / 28), (33 / 30, 34 / 30))
    )
    assert (alike.low, alike.high) == pytest.approx((30 * math.exp(-below), 30 * math.exp(above)))
    assert not mean_time([Interval(30, 29, 33), Interval(31.0)]).has_bounds


@pytest.mark.parametrize("regular", ["0,20", ",20"])
def test_a_table_by_k_has_the_price_of_one_draft_token(tmp_path: Path, regular: str) -> None:
    file = tmp_path / "by_k.csv"
    # As Excel saves it.
    file.write_text("\n".join(["K,ms", regular, "1,25", "3,30"]), encoding="utf-8-sig")
    (cost,) = read_table("costs", str(file)).costs.values()
    assert list(cost.ks()) == [1, 3]
    assert cost.at(1).steps.estimate == pytest.approx(1.25)
    same = "| mode | K | TPOT (ms) | AL |\n|---|---|---|---|\n| none | | 20.0 | |\n| MTP | 1 | 12.5 | 2.00 |"
    for other in ("width,ms\n1,20\n2,25\n", same):
        file.write_text(other)
        (cost,) = read_table("costs", str(file)).costs.values()
        assert cost.at(1).steps.estimate == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("from_k", "change", "percent"), [(8, 8 / 34, "+24 %"), (3, 8 / 24, "+33 %")]
)
def test_a_step_is_sought_by_what_was_measured_well(
    from_k: int, change: float, percent: str
) -> None:
    """A jump of 8 ms; of one width the mean of three prompts is far off, as its interval says."""
    points = []
    for k in (2, 3, 4, 5, 6, 7, 8, 10, 12):
        ms = 20.0 + 2.0 * k + (8.0 if k >= from_k else 0.0)
        half = 0.05
        if k == 4:
            ms, half = ms + 9.0, 12.0
        points.append((k + 1, 1, Interval(ms, ms - half, ms + half, Coverage(15, "prompt"))))
    shape = cost_of(points).shape()
    (jump,) = shape.jumps
    assert jump[:2] == (from_k, from_k + 1)
    assert jump.change == pytest.approx(change, abs=0.003)
    assert shape.why_no_line == f"no line, from {from_k} to {from_k + 1} tokens {percent}"


@pytest.mark.parametrize(("off", "is_line"), [(0.25, True), (1.2, False)])
def test_times_without_decimals_are_known_to_their_rounding(off: float, is_line: bool) -> None:
    """Bounds that cover no units are those of rounding: half a millisecond is a deviation of 0.29 ms."""
    points = []
    for k in (2, 4, 6, 8, 10, 12):
        ms = 3.0 + k + (off if k % 4 else -off)
        points.append((k + 1, 1, Interval(ms, ms - 0.5, ms + 0.5)))
    shape = cost_of(points).shape()
    assert (shape.fixed is not None, shape.tested) == (is_line, False)


def test_a_line_is_over_the_tokens_that_were_drafted() -> None:
    """K=1 and 3, of which the ends of answers left 1 and 2: 5 ms each."""
    points = [
        Point(2, 2, Interval(25, 24, 26, Coverage(15, "prompt"))),
        Point(4, 2, Interval(30, 29, 31, Coverage(15, "prompt")), num_drafted=2.0),
    ]
    assert line_of(IterationCost(points), 2) == pytest.approx((20, 5, math.sqrt(2)))
    assert IterationCost(points).shape() is None


TABLE = """k,in_flight,text,ms_per_token,acceptance_length
,1,code,20,
4,1,code,10,3.0
,1,chat,22,
4,1,chat,11,2.5
"""


@pytest.mark.parametrize(
    ("content", "word", "complaint"),
    [
        (TABLE, "", "has several text: code, chat; name one"),
        (TABLE, "@prose", "has no row with prose"),
        ("text,ms\ncode,20\n", "", "must have a column k or width"),
        ("width,ms\n0,20\n1,20\n", "", "row 1 is not understood: width is 0"),
        ("ctx,k,ms\n1024,,20\n50000,4,30\n", "", "has several ctx: 1024, 50000; name one"),
        ("k,ms\n,20\n4,1e-308\n", "", "row 2 is not understood: ms is 1e-308"),
        ("k,in_flight,ms\n,0,20\n", "", "row 1 is not understood: in_flight is 0"),
        (
            "k,ms,low,high\n4,20,30,40\n",
            "",
            "row 1 is not understood: 20 ms is not between 30.0 and 40.0",
        ),
        ("k,ms,low,high\n4,20,10,\n", "", "20 ms is not between 10.0"),
        ("k,in_flight,ms\n4,1.5,20\n", "", "row 1 is not understood: in_flight is 1.5"),
        ("k,ms,acceptance_length\n4,20,9\n", "", "9 tokens per iteration of 5"),
    ],
)
def test_tables_that_are_not_understood(
    tmp_path: Path, content: str, word: str, complaint: str
) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(SettingError) as refused:
        read_table("costs", f"{tmp_path}/t.csv{word}")
    assert complaint in str(refused.value)


def test_a_queue_is_said_in_the_figure_that_judges_it(tmp_path: Path) -> None:
    """Regular answers take 1.25 times their decoding, drafted ones 2.5 times: twice as long."""
    head = "k,in_flight,ms_per_token,acceptance_length,tokens_per_second"
    (tmp_path / "t.csv").write_text(f"{head}\n,8,20,,40\n4,8,10,3,40\n")
    (cost,) = read_table("costs", str(tmp_path / "t.csv")).costs.values()
    assert "answers take 2.0 times as long as decoding alone" in cost.refused[8]


MIXED = """k, rows, ms, acceptance_length, draft, dataset
0, 1, 20,, , {none}
4, 1, 30, 3.0, EAGLE, HumanEval
4, 1, 30, 2.0, EAGLE, MTBench
"""


@pytest.mark.parametrize("none", ["", "-"])
def test_a_regular_step_without_a_mark_is_of_all_data_and_drafts(tmp_path: Path, none: str) -> None:
    (tmp_path / "t.csv").write_text(MIXED.format(none=none))
    with pytest.raises(SettingError, match="has several dataset: HumanEval, MTBench; name one"):
        read_table("costs", f"{tmp_path}/t.csv")
    table = read_table("costs", f"{tmp_path}/t.csv@EAGLE@MTBench")
    assert table.costs["EAGLE"].at(4).steps.estimate == pytest.approx(1.5)
    assert table.yields["EAGLE"][4].estimate == 2.0


DRAFTED = """# where it is from
k, in_flight, ms, ms_low, ms_high, ms_per_token, acceptance_length, draft, seed
0, 1, 20, , , , , , 1
0, 8, , , , 40, , , 1
1, 1, 25, 25, 26, , 1, EAGLE, 2
1, 2, 25, , , , 1.04, EAGLE, 2
2, 1, , , , 9, , EAGLE, 2
4, 1, 30, 29, 30, , 3, EAGLE, 2
4, 8, 80, , , , 3.3, EAGLE, 2
8, 1, , , , 10, 5, EAGLE, 2
"""


def test_a_table_has_costs_yields_and_speedups_of_each_draft(tmp_path: Path) -> None:
    """Per token after the first an iteration has a price only where its tokens are known."""
    (tmp_path / "t.csv").write_text(DRAFTED)
    table = read_table("costs", str(tmp_path / "t.csv"))
    (cost,) = table.costs.values()
    assert (cost.loads, cost.ks(), cost.ks(2), cost.ks(8)) == ([1, 2, 8], [1, 4, 8], [], [4])
    assert (cost.at(1).ms.low, cost.at(4).ms.high, cost.point(0, 8).ms.estimate) == (25, 30, 40)
    yields = {k: length.estimate for k, length in table.yields["EAGLE"].items()}
    assert yields == pytest.approx({1: 1.02, 4: 3.15, 8: 5})
    # 25, 30 and 5 · 10 ms are 1.25, 1.5 and 2.5 steps, 80 ms with 8 in flight are 2.
    speedups = {(1, 1): 0.8, (4, 1): 2.0, (8, 1): 2.0, (4, 8): 1.65}
    assert table.measured == pytest.approx({("EAGLE", *at): speedups[at] for at in speedups})
    # At each load what it yields there, elsewhere the mean.
    assert [table.yields_at["EAGLE", load][4].estimate for load in (1, 8)] == pytest.approx(
        [3, 3.3]
    )
    assert table.for_draft("costs", "EAGLE", "t.csv").costs == table.costs
    with pytest.raises(SettingError, match="has no draft lookup, but EAGLE"):
        table.for_draft("costs", "lookup", "t.csv")
    # A stalled row is no measurement of decoding.
    (tmp_path / "t.csv").write_text(DRAFTED + "8, 8, 90000, , , , 4, EAGLE, 2\n")
    table = read_table("costs", str(tmp_path / "t.csv"))
    assert (table.costs["EAGLE"].ks(8), len(table.notes)) == ([4], 1)


def test_steps_that_leave_times_unexplained_are_not_named() -> None:
    """Each time is twice the one before: a line and one jump miss them, and there are no points for more."""
    times = {2: 10.0, 3: 20.0, 4: 40.0, 5: 80.0}
    points = [
        (width, 1, Interval(ms, ms - 0.05, ms + 0.05, Coverage(15, "prompt")))
        for width, ms in times.items()
    ]
    shape = cost_of(points).shape()
    assert (shape.fixed, [*shape.jumps], shape.why_no_line) == (None, [], "no line")


def swept(
    rng: np.random.Generator, ks: Sequence[int], start_noise: float, jump_ms: float = 0.0
) -> tuple[list[Point], list[float]]:
    """Iterations of 20 + 2.5 K ms, of 15 prompts, each behind a start of its own; and the regular steps beside them."""
    points, steps_ms = [], []
    for k in ks:
        iteration_ms = 20 + 2.5 * k + (jump_ms if k >= 8 else 0)
        for width, ms in ((1, 20.0), (k + 1, iteration_ms)):
            prompts = ms * np.exp(rng.normal(0, start_noise)) * rng.normal(1, 0.02, 15)
            half = t_quantile(0.025, 14) * prompts.std(ddof=1) / math.sqrt(15)
            mean = prompts.mean()
            time = Interval(mean, mean - half, mean + half, Coverage(15, "prompt"))
            if width == 1:
                steps_ms.append(mean)
            else:
                points.append(Point(width, 1, time))
    return points, steps_ms


@pytest.mark.parametrize("ks", [(2, 4, 6, 8, 10), (1, 2, 3, 4, 6, 8, 10)])
@pytest.mark.parametrize("start_noise", [0.01, 0.04])
def test_starts_that_differ_invent_no_steps(ks: Sequence[int], start_noise: float) -> None:
    """A line is called none in about 5 % of the sweeps, and its slope is in its interval; a jump of 8 ms is found."""
    rng = np.random.default_rng(0)
    number = 200
    false_alarms = twin_alarms = num_covered = num_found = 0
    for _ in range(number):
        points, steps_ms = swept(rng, ks, start_noise)
        shape = shape_of(points, StartNoise.of(steps_ms))
        twin = shape_of(points)
        false_alarms += shape.fixed is None
        twin_alarms += twin.fixed is None
        num_covered += shape.per_token is None or shape.per_token.low < 2.5 < shape.per_token.high
        points, steps_ms = swept(rng, ks, start_noise, jump_ms=8.0)
        shape = shape_of(points, StartNoise.of(steps_ms))
        num_found += shape is not None and [step[:2] for step in shape.jumps] == [(7, 9)]
    assert false_alarms <= 0.09 * number
    assert num_covered >= 0.9 * number
    if start_noise >= 0.02:
        assert twin_alarms > 0.3 * number
    if start_noise <= 0.01:
        assert num_found > 0.9 * number
