"""χ² tests against published values, against simulation, and against faults planted on purpose."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy import stats

from harness.results.statistics.chi_square import (
    chi_square_distance,
    chi_square_p_value,
    chi_square_tail_power,
    chi_square_test,
    least_visible_shift,
)


def chi_square_power(
    null: ArrayLike, alternative: ArrayLike, num_draws: int, alpha: float
) -> float:
    """Chance that `chi_square_test` rejects `null` when draws follow the alternative, as `recovery` computes it."""
    noncentrality = num_draws * chi_square_distance(null, alternative, num_draws)
    return chi_square_tail_power(len(np.asarray(null)) - 1, noncentrality, alpha)


def test_chi_square_equals_mendels() -> None:
    # Mendel's 556 peas in the ratio 9:3:3:1: χ² = 0.470 on 3 degrees of freedom, p = 0.925.
    result = chi_square_test([315, 108, 101, 32], np.array([9, 3, 3, 1]) / 16)
    assert result.statistic == pytest.approx(0.470, abs=5e-4)
    assert result.degrees_of_freedom == 3
    assert result.p_value == pytest.approx(0.925, abs=1e-3)
    assert result.degrees_of_freedom == 3


def test_rare_cells_are_pooled_into_one() -> None:
    # Expected counts of 100 draws: 60, 30, and 4 + 4 + 2 pooled. Observed there: 10, as expected.
    result = chi_square_test([60, 30, 10, 0, 0], [0.6, 0.3, 0.04, 0.04, 0.02])
    assert result.degrees_of_freedom == 2
    assert result.statistic == pytest.approx(0.0, abs=1e-12)


def test_a_pool_that_stays_rare_takes_in_the_smallest_other_cell() -> None:
    # Expected counts 60, 39, and 1 alone: one draw too many there would weigh as much as ten in a full cell.
    result = chi_square_test([60, 35, 5], [0.6, 0.39, 0.01])
    assert result.degrees_of_freedom == 1
    assert result.p_value == 1.0


def test_impossible_cells_do_not_count_until_one_is_drawn() -> None:
    assert chi_square_test([50, 50, 0], [0.5, 0.5, 0.0]).degrees_of_freedom == 1
    caught = chi_square_test([5000, 5000, 1], [0.5, 0.5, 0.0])
    assert caught.p_value == 0.0
    assert caught.statistic == math.inf


def test_a_certain_outcome_can_only_be_confirmed_or_refuted() -> None:
    assert chi_square_test([10, 0], [1.0, 0.0]).p_value == 1.0
    assert chi_square_test([9, 1], [1.0, 0.0]).p_value == 0.0


def test_probabilities_of_float32_are_accepted() -> None:
    probabilities = np.random.default_rng(0).dirichlet(np.ones(5000)).astype(np.float32)
    counts = np.random.default_rng(1).multinomial(
        100_000, probabilities / probabilities.sum(dtype=np.float64)
    )
    assert chi_square_test(counts, probabilities).p_value > 1e-6


@pytest.mark.parametrize(
    ("counts", "probabilities"),
    [
        ([1, 2], [0.5, 0.25, 0.25]),
        ([0, 0], [0.5, 0.5]),
        ([-1, 2], [0.5, 0.5]),
        ([1, 2], [0.5, 0.4]),
        ([1, 2], [1.5, -0.5]),
        ([1, 2], [0.5, math.nan]),
    ],
)
def test_chi_square_refuses_nonsense(counts: list[int], probabilities: list[float]) -> None:
    with pytest.raises(ValueError, match=r"counts|probabilities"):
        chi_square_test(counts, probabilities)


def test_chi_square_p_values_are_uniform_under_the_null() -> None:
    """Kolmogorov and Smirnov's test over 2000 repetitions, seeded: false alarm rate 1e-9."""
    rng = np.random.default_rng(3)
    # A long tail like a vocabulary's, so that pooling is at work.
    probabilities = rng.dirichlet(np.full(200, 0.3))
    p_values = [
        chi_square_test(rng.multinomial(5000, probabilities), probabilities).p_value
        for _ in range(2000)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-9
    # The approximation is a little eager in the tail; twice the nominal rate would be a fault.
    assert np.mean(np.array(p_values) < 0.05) < 0.08


def test_a_planted_deviation_is_caught() -> None:
    """A sampler that moves two percent of the mass to another token, at 100,000 draws."""
    rng = np.random.default_rng(4)
    probabilities = rng.dirichlet(np.ones(50))
    broken = probabilities.copy()
    broken[np.argmax(probabilities)] -= 0.02
    broken[0] += 0.02
    assert chi_square_power(probabilities, broken, 100_000, alpha=1e-9) > 0.999
    assert (
        chi_square_test(rng.multinomial(100_000, broken), probabilities, min_expected=100).p_value
        < 1e-9
    )
    assert (
        chi_square_test(
            rng.multinomial(100_000, probabilities), probabilities, min_expected=100
        ).p_value
        > 1e-9
    )


def test_power_equals_cohens_table() -> None:
    # Cohen 1988, power of χ² tests at alpha 0.05, effect size w = 0.3, n = 100: 0.85 with one degree of freedom, 0.71
    # with three. Two cells 0.5 ± 0.15 and four cells 0.25 ± 0.075 have w = 0.3.
    two = chi_square_power([0.5, 0.5], [0.65, 0.35], 100, alpha=0.05)
    four = chi_square_power([0.25] * 4, [0.325, 0.175, 0.325, 0.175], 100, alpha=0.05)
    assert round(two, 2) == 0.85
    assert round(four, 2) == 0.71


def test_power_is_what_simulation_finds() -> None:
    rng = np.random.default_rng(5)
    null, alternative = rng.dirichlet(np.ones(20)), np.empty(20)
    alternative[:] = 0.9 * null + 0.1 / 20
    caught = [
        chi_square_test(rng.multinomial(1000, alternative), null).p_value < 0.01
        for _ in range(2000)
    ]
    assert chi_square_power(null, alternative, 1000, alpha=0.01) == pytest.approx(
        np.mean(caught), abs=0.06
    )


def test_power_without_a_difference_is_alpha() -> None:
    assert chi_square_power([0.5, 0.5], [0.5, 0.5], 1000, alpha=0.01) == pytest.approx(0.01)


def test_a_tolerated_deviation_is_not_rejected_and_a_larger_one_is() -> None:
    exact, near, far = [0.5, 0.3, 0.2], [0.51, 0.29, 0.2], [0.55, 0.25, 0.2]
    tolerance = chi_square_distance(exact, near, 1_000_000)
    assert tolerance == pytest.approx(0.01**2 / 0.5 + 0.01**2 / 0.3)
    for actual, rejected, rejected_strictly in (
        (exact, False, False),
        (near, False, True),
        (far, True, True),
    ):
        counts = 1_000_000 * np.array(actual)
        statistic = chi_square_test(counts, exact).statistic
        assert (
            chi_square_p_value(statistic, 2, tolerated=tolerance * 1_000_000) < 1e-9
        ) == rejected
        assert (chi_square_test(counts, exact).p_value < 1e-9) == rejected_strictly
    # Draws from what is just tolerated are rejected as often as the level says.
    assert chi_square_tail_power(
        2, 1e6 * tolerance, alpha=0.01, tolerated=1e6 * tolerance
    ) == pytest.approx(0.01)
    noncentrality = 1e4 * (0.05**2 / 0.5 + 0.05**2 / 0.3)
    assert chi_square_power(exact, far, 10_000, 0.01) == pytest.approx(
        1 - stats.ncx2.cdf(stats.chi2.isf(0.01, 2), 2, noncentrality)
    )
    assert chi_square_tail_power(0, 5.0, 0.01) == 0
    assert chi_square_p_value(0.0, 0) == 1


def test_the_least_visible_shift_has_its_distance_and_is_hard_to_see() -> None:
    probabilities = np.random.default_rng(6).dirichlet(np.ones(40))
    shifted = least_visible_shift(probabilities, 0.05)
    assert shifted.sum() == pytest.approx(1)
    assert np.abs(shifted - probabilities).sum() / 2 == pytest.approx(0.05)
    # No shift of this size has a smaller χ² distance than 4 · 0.05².
    assert chi_square_distance(probabilities, shifted, 10**9) == pytest.approx(
        4 * 0.05**2, rel=0.01
    )
    uneven = least_visible_shift([0.97, 0.03], 0.05)
    assert uneven == pytest.approx([0.92, 0.08])
    assert least_visible_shift([1.0], 0.05) == pytest.approx([1.0])
    with pytest.raises(ValueError, match="total_variation"):
        least_visible_shift([0.5, 0.5], 0.0)
