"""Bounds on tokens per iteration that hold at every look."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from harness.results.statistics import stopping
from harness.results.statistics.arrays import Floats
from harness.results.statistics.confidence_sequences import anytime_tokens_per_iteration
from harness.results.statistics.ratios import skewed_ratio_of_totals

K = 4
# Half of the prompts get 4 tokens of each iteration, the others 1.6.
TRUTH = 2 / (1 / 4 + 1 / 1.6)


def looks(seed: int) -> Iterator[tuple[Floats, Floats]]:
    """The tokens and iterations of the first 8, 10, 12, ... of 400 prompts."""
    rng = np.random.default_rng(seed)
    tokens = np.full(400, 64.0)
    iterations = tokens / np.where(rng.random(400) < 0.5, 4, 1.6)
    for number in stopping.looks(400, first=8):
        yield tokens[:number], iterations[:number]


def test_the_truth_is_hardly_ever_left_at_any_look() -> None:
    missed = {"anytime": 0, "for one look": 0}
    for seed in range(60):
        bounds = [anytime_tokens_per_iteration(*units, K) for units in looks(seed)]
        missed["anytime"] += any(one.excludes(TRUTH) for one in bounds)
        of_one_look = [skewed_ratio_of_totals(*units) for units in looks(seed)]
        missed["for one look"] += any(one.excludes(TRUTH) for one in of_one_look)
    assert missed["anytime"] <= 3
    assert missed["for one look"] > 10, "the broken twin: an interval for one look"


def test_bounds_are_where_bets_have_won_enough() -> None:
    tokens = np.array([30.0, 60, 45])
    iterations = np.array([10.0, 25, 30])
    bounds = anytime_tokens_per_iteration(tokens, iterations, K)
    assert bounds.estimate == pytest.approx(135 / 65)
    for m, gains in (
        (bounds.low, (tokens - bounds.low * iterations) / (bounds.low - 1)),
        (bounds.high, (bounds.high * iterations - tokens) / (1 - bounds.high / 5)),
    ):
        assert 1 < m < 5
        capitals = [math.prod(1 + share * gains / 60) for share in np.linspace(0.02, 0.98, 25)]
        assert np.mean(capitals) == pytest.approx(2 / 0.05)


def test_bounds_do_not_depend_on_the_order_and_are_wider_at_a_smaller_level() -> None:
    tokens, iterations = list(looks(0))[-1]
    bounds = anytime_tokens_per_iteration(tokens, iterations, K)
    turned = anytime_tokens_per_iteration(tokens[::-1], iterations[::-1], K)
    assert (bounds.low, bounds.high) == pytest.approx((turned.low, turned.high))
    wider = anytime_tokens_per_iteration(tokens, iterations, K, alpha=0.001)
    assert 1 < wider.low < bounds.low < bounds.estimate < bounds.high < wider.high < K + 1
    assert bounds.low == pytest.approx(bounds.estimate, rel=0.1)


def test_a_draft_that_is_never_accepted_is_bounded_from_above_alone() -> None:
    bounds = anytime_tokens_per_iteration([64.0] * 64, [64.0] * 64, K)
    assert bounds.low == bounds.estimate == 1
    assert bounds.high < 1.1
    always = anytime_tokens_per_iteration([60.0] * 64, [12.0] * 64, K)
    assert always.high == always.estimate == 5
    assert always.low > 2
    assert str(bounds.covers) == "64 prompts"


def test_other_shapes_and_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        anytime_tokens_per_iteration([64.0], [0.0], K)
    with pytest.raises(ValueError, match="numerators"):
        anytime_tokens_per_iteration([64.0, 1], [1.0], K)
