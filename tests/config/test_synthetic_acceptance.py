"""`decoding.synthetic_acceptance` in each of its shapes becomes rates by position."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.config.synthetic import marginal_rates


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
