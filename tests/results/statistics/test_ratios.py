"""Ratios of totals against simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import (
    Rare,
    _bounds_over_subsets,
    _expanded,
    at_equal_lengths,
    bootstrapped,
    drift,
    drift_matters,
    log_ratio,
    rare_units,
    ratio_of_totals,
    totals_by_unit,
)
from harness.results.statistics.stopping import half_width


def test_ratio_of_a_handful_has_no_interval_and_of_nothing_no_value() -> None:
    for number in (1, 7):
        few = ratio_of_totals([3.0] * number, [2.0] * number, num_resamples=200, seed=0)
        assert few.estimate == pytest.approx(1.5)
        assert math.isnan(few.low)
        assert math.isnan(few.high)
    enough = ratio_of_totals(range(1, 9), range(2, 10), num_resamples=200, seed=0)
    assert enough.low < 36 / 44 < enough.high
    assert math.isnan(ratio_of_totals([], [], num_resamples=200, seed=0).estimate)


def test_an_interval_allows_for_rare_units_that_it_has_not_seen() -> None:
    """Its ends are at the t whose transform by Hall's cubic is Student's quantile, found here by bisection."""
    tops = np.array([1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0, 1.1, 0.9, 1.4])
    found = log_ratio([tops], [np.ones(10)], skewed=True)
    a = stats.skew(tops, bias=False) / (6 * math.sqrt(10))
    for quantile, end in ((0.975, found.low), (0.025, found.high)):
        wanted = stats.t.ppf(quantile, 9)
        t = optimize.brentq(
            lambda t, wanted=wanted: t + a * (2 * t**2 + 1) + 4 / 3 * a**2 * t**3 - wanted, -9, 9
        )
        assert end == pytest.approx(tops.mean() * math.exp(-t * stats.sem(tops / tops.mean())))


def test_units_that_hold_most_of_the_variance_are_found() -> None:
    usual = np.linspace(0.95, 1.05, 8)
    assert rare_units(usual, usual[::-1]) is None
    two = usual.copy()
    two[[1, 5]] = 5.0
    assert rare_units(two, usual) == Rare(2, pytest.approx(5.0, rel=0.02), is_numerator=True)
    one = usual.copy()
    one[3] = 4.0
    assert rare_units(usual, one) == Rare(1, pytest.approx(4.0, rel=0.02), is_numerator=False)
    # A prompt that takes both arms as long says nothing about their ratio, and seven units are too few.
    assert rare_units(one, one) is None
    assert rare_units(usual[:7], one[:7]) is None


def test_no_bound_is_beyond_what_a_unit_has_shown() -> None:
    """Tokens of 3 iterations with K=4: 5 each are the most, and no prompt is below 11 / 3."""
    found = log_ratio([[11, 11, 15, 15, 15, 15, 15, 15]], [[3] * 8], skewed=True)
    assert found.low == pytest.approx(11 / 3)
    assert found.high == pytest.approx(5)


@pytest.mark.parametrize("skewed", [True, False])
def test_without_skewness_the_interval_is_students(skewed: bool) -> None:
    changes = np.array([-3.0, -2, -1, 0, 0, 1, 2, 3]) / 10
    found = log_ratio([2 * (1 + changes)], [1 - changes], skewed=skewed)
    half_width = stats.t.ppf(0.975, 7) * 2 * changes.std(ddof=1) / math.sqrt(8)
    expected = [2, 2 * math.exp(-half_width), 2 * math.exp(half_width)]
    assert [found.estimate, found.low, found.high] == pytest.approx(expected)


@pytest.mark.filterwarnings("error")
def test_ratio_of_constant_times_is_a_point() -> None:
    interval = ratio_of_totals([3.0] * 15, [2.0] * 15, num_resamples=200, seed=0)
    assert (interval.low, interval.high) == pytest.approx((1.5, 1.5))
    interval = log_ratio([[3.0] * 15], [[2.0] * 15], skewed=True)
    assert (interval.low, interval.high) == pytest.approx((1.5, 1.5))
    # Prompts differ a hundredfold, and the ratio not at all.
    interval = ratio_of_totals(2 * np.geomspace(1, 100, 15), np.geomspace(1, 100, 15), 200)
    assert (interval.low, interval.high) == pytest.approx((2, 2))
    assert math.isnan(log_ratio([[3.0] * 7], [[2.0] * 7], skewed=True).low)
    assert math.isnan(log_ratio([[]], [[]], skewed=True).estimate)


def test_half_of_a_width_is_a_share_of_the_estimate() -> None:
    assert half_width(Interval(2.0, 1.9, 2.2)) == pytest.approx(0.075)


def test_one_block_has_no_interval() -> None:
    one = log_ratio([[3.0]], [[2.0]], "block")
    assert (one.estimate, str(one.covers)) == (1.5, "1 block")
    assert math.isnan(one.low)
    assert log_ratio([[3.0, 3.3]], [[2.0, 2.1]], "block").has_bounds


@pytest.mark.parametrize("size", [8, 15, 200])
def test_the_percentile_interval_of_a_mean_is_expanded_to_students(size: int) -> None:
    """A bootstrap's standard deviation of a mean is smaller by √((n - 1) / n), and its quantiles are normal ones."""
    normal = stats.norm.ppf((1 + _expanded(0.95, size)) / 2)
    assert normal * math.sqrt((size - 1) / size) == pytest.approx(stats.t.ppf(0.975, size - 1))
    values = stats.norm.ppf((np.arange(size) + 0.5) / size)
    bounds = bootstrapped([values], np.mean, 10_000, 0, 0.95)
    half_width = stats.t.ppf(0.975, size - 1) * stats.sem(values)
    assert bounds == pytest.approx((-half_width, half_width), rel=0.07)


def test_bounds_over_all_subsets() -> None:
    """255 ratios cut the line into 256 parts: 6 of them, 2.3 %, are below the sixth ratio."""
    tops, bottoms = np.random.default_rng(0).gamma(4, 1, (2, 8))
    subsets = (list(s) for size in range(1, 9) for s in itertools.combinations(range(8), size))
    ratios = sorted(tops[units].sum() / bottoms[units].sum() for units in subsets)
    expected = ratios[5], ratios[-6]
    assert _bounds_over_subsets(tops, bottoms, 255, 0, 0.95) == pytest.approx(expected)
    # An interval reaches as far as these bounds, and those of a bootstrap.
    low, high = bootstrapped(
        (tops, bottoms), lambda x, y, axis: x.sum(axis) / y.sum(axis), 255, 0, 0.95
    )
    assert expected[0] < low < expected[1] < high
    found = ratio_of_totals(tops, bottoms, num_resamples=255)
    assert (found.low, found.high) == pytest.approx((expected[0], high))
    # Of more units, as many subsets as there are, but drawn.
    tops, bottoms = np.random.default_rng(0).gamma(4, 1, (2, 14))
    every = _bounds_over_subsets(tops, bottoms, 2**14 - 1, 0, 0.95)
    drawn = _bounds_over_subsets(tops, bottoms, 2**14 - 2, 0, 0.95)
    assert drawn != every
    assert drawn == pytest.approx(every, rel=0.02)


def test_requests_of_a_lap_are_one_unit() -> None:
    assert totals_by_unit([1.0, 2.0, 4.0], ["b", "a", "b"]).tolist() == [5.0, 2.0]


def test_a_small_drift_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    step = np.repeat([1.0, 1.01], 50) * np.exp(rng.normal(0, 0.001, 100))
    found = drift(step, np.ones(100))
    assert found.excludes(1)
    assert found.estimate == pytest.approx(1.01, abs=1e-3)
    # As far below as above, as logarithms.
    assert found.low * found.high == pytest.approx(found.estimate**2)
    assert not drift_matters(found)


def test_halves_of_different_variances_are_compared_by_welch() -> None:
    """The first half has no variance: all degrees of freedom are those of the second."""
    second = np.array([0.9, 1.1] * 4 + [1.0])
    found = drift([1.0] * 8 + second.tolist(), np.ones(17))
    half_width = stats.t.ppf(0.975, 8) * second.std(ddof=1) / 3
    assert [found.low, found.high] == pytest.approx([math.exp(-half_width), math.exp(half_width)])
    assert drift_matters(drift([1.0] * 8 + (1.2 * second).tolist(), np.ones(17)))
    # Answers that are longer take longer, and nothing differs.
    lengths = np.geomspace(15, 400, 40)[np.random.default_rng(0).permutation(40)]
    assert drift(2 * lengths, lengths).low == pytest.approx(1)


def test_drift_of_a_few_units_has_no_interval() -> None:
    few = drift([1.0] * 15, [1.0] * 15)
    assert few.estimate == 1
    assert math.isnan(few.low)
    assert not drift_matters(few)
    assert math.isnan(drift([1.0], [1.0]).estimate)
    # One long answer in eight is half of all.
    assert not drift([1.0] * 16, [*[6.0] * 7, 256.0] * 2).has_bounds
    same = drift([1.0] * 16, [1.0] * 16)
    assert (same.low, same.high) == (1, 1)


def test_lengths_that_are_drawn_in_each_arm_are_no_part_of_the_variance() -> None:
    """A regular unit of half the mean length, of 0.75 in both arms, has 0.25 times the 10 ms per token added."""
    values = at_equal_lengths([[100, 300], [50, 150]], [[10, 30], [20, 20]])
    assert values.tolist() == [[100 / 20 + 2.5, 300 / 20 - 2.5], [50 / 20 - 1.25, 150 / 20 + 1.25]]


def test_values_stay_positive_where_a_long_answer_was_very_fast() -> None:
    times = np.array([[50.0, 500.0, 500.0, 500.0], [60.0, 500.0, 500.0, 500.0]])
    tokens = np.array([[5, 50, 50, 50], [200, 50, 50, 50]])
    values = at_equal_lengths(times, tokens)
    assert (values > 0).all()
    assert values.mean(axis=1) == pytest.approx(times.sum(axis=1) / tokens.sum(axis=1))


@pytest.mark.parametrize("num_blocks", [2, 4, 8])
def test_the_interval_over_blocks_covers_what_differs_from_start_to_start(num_blocks: int) -> None:
    """Each start is up to some per cent slower or faster, blocks have prompts of their own, and no arm is faster."""
    rng = np.random.default_rng(num_blocks)
    num_excluded = 0
    for _ in range(2_000):
        prompts = rng.gamma(20, 1, num_blocks)
        regular, speculative = (prompts * np.exp(rng.normal(0, 0.03, num_blocks)) for _ in range(2))
        num_excluded += log_ratio([regular], [speculative], "block").excludes(1)
    assert 0.035 < num_excluded / 2_000 < 0.065


@pytest.mark.parametrize(("num_prompts", "least"), [(15, 0.92), (60, 0.925)])
def test_bootstrap_interval_covers_the_truth(num_prompts: int, least: float) -> None:
    """Over 1000 simulated runs, whose count of covered ones has a standard error of 0.8 %.

    With 15 prompts the expanded interval covers 93.8 % of these; the plain one, 90.9 %, fails here.
    """
    rng = np.random.default_rng(1)
    covered = 0
    for run in range(1000):
        speculative = rng.gamma(20, 1 / 20, num_prompts)
        regular = 2 * rng.normal(1, 0.02, num_prompts)
        interval = ratio_of_totals(regular, speculative, num_resamples=400, seed=run)
        covered += interval.low <= 2.0 <= interval.high
    assert least <= covered / 1000 <= 0.97


@pytest.mark.parametrize(("size", "least", "most"), [(0.0, 0.0, 0.08), (0.1, 0.9, 1.0)])
def test_drift_is_found_and_seldom_invented(size: float, least: float, most: float) -> None:
    """A step of the speed-up halfway; false alarms at a nominal 5 %, over 500 simulated runs."""
    rng = np.random.default_rng(0)
    step = np.repeat([0.0, size], 20)
    excluded, mattered = 0, 0
    for _ in range(500):
        hardness = rng.lognormal(0, 0.5, 40)
        speculative = hardness * np.exp(rng.normal(0, 0.08, 40) - step)
        found = drift(2 * hardness, speculative)
        excluded += found.excludes(1)
        mattered += drift_matters(found)
    assert least <= excluded / 500 <= most
    assert mattered <= excluded
