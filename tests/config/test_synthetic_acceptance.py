"""`decoding.synthetic_acceptance` in each of its shapes becomes rates by position."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.config.synthetic import length_deviation, marginal_rates, mean_length


def rates(asked: Any, k: Any = 4) -> tuple[float, ...] | None:
    return DecodingSettings(synthetic_acceptance=asked, num_draft_tokens=k).synthetic_rates


def test_numbers_and_lists_are_rates() -> None:
    assert rates(None) is None
    assert rates(0.8) == (0.8,)
    assert rates(1.0) == (1.0,)
    assert rates((0.9, 0.5)) == (0.9, 0.5)


@pytest.mark.parametrize("length", [1.001, 2.6, 4.999, 5.0])
def test_a_length_becomes_the_rate_with_that_mean(length: float) -> None:
    found = rates(length)
    assert found is not None
    assert 1 + sum(marginal_rates(found, 4)) == pytest.approx(length)


@pytest.mark.parametrize("k", [4, "auto"])
def test_nan_is_no_rate(k: Any) -> None:
    with pytest.raises(SettingError, match=r"must be in \[0, 1\]"):
        rates(math.nan, k)


def test_rates_of_prefixes_repeat_the_last_and_end_with_k() -> None:
    assert marginal_rates((0.5,), 3) == [0.5, 0.25, 0.125]
    assert marginal_rates((0.8, 0.5), 3) == pytest.approx([0.8, 0.4, 0.2])
    assert marginal_rates((0.8, 0.5, 0.1), 1) == [0.8]


@pytest.mark.parametrize(("asked", "length"), [(0.8, 2.952), ((0.9, 0.5), 2.575), (2.952, 2.952)])
def test_the_mean_length_counts_the_targets_own_token(asked: Any, length: float) -> None:
    assert mean_length(asked, 3) == pytest.approx(length)


@pytest.mark.parametrize("asked", [(0.9, 0.5), 0.8, 0.0, 1.0])
def test_the_deviation_is_that_of_all_iterations(asked: Any) -> None:
    """Three tokens, each accepted or not, weighted by their chances."""
    first, second = asked if isinstance(asked, tuple) else (asked, asked)
    # The last rate holds for all later positions.
    chances = (first, second, second)
    mean = square = 0.0
    for accepted in itertools.product((False, True), repeat=3):
        weight = math.prod(
            chance if taken else 1 - chance for chance, taken in zip(chances, accepted, strict=True)
        )
        length = 1 + len([*itertools.takewhile(bool, accepted)])
        mean += weight * length
        square += weight * length**2
    assert mean_length(asked, 3) == pytest.approx(mean)
    assert length_deviation(asked, 3) == pytest.approx(math.sqrt(max(0.0, square - mean**2)))


def test_a_length_is_at_most_one_more_than_k() -> None:
    assert rates(5.0) == rates(2.0, 1) == (1.0,)
    with pytest.raises(SettingError, match=r"at most K \+ 1 = 5"):
        rates(5.01)
