"""`decoding.synthetic_acceptance` in each of its shapes becomes rates by position."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.config.synthetic import marginal_rates

# What Model-Optimizer published of MiniMax-M2.7-DFlash on MT-Bench.
PUBLISHED: dict[str, Any] = {
    "schema_version": "1.0",
    "measured": True,
    "conditional_accept_rates": [0.816082, 0.776577, 0.749591],
    "mean_accept_length": 2.924887,
}


def rates(asked: Any, k: Any = 4) -> tuple[float, ...] | None:
    return DecodingSettings(synthetic_acceptance=asked, num_draft_tokens=k).synthetic_rates


def profile(directory: Path, **changes: Any) -> str:
    file = directory / "speculation_profile.json"
    file.write_text(json.dumps(PUBLISHED | changes))
    return str(file)


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


def test_a_profile_of_another_tool_gives_its_rates(tmp_path: Path) -> None:
    found = rates(profile(tmp_path), k=3)
    assert found == (0.816082, 0.776577, 0.749591)
    assert 1 + sum(marginal_rates(found, 3)) == pytest.approx(2.924887, abs=1e-5)


def test_our_own_rates_come_first_and_a_length_last(tmp_path: Path) -> None:
    # Half of the proposals end before their third token.
    own = {"accept_rates_of_tested": [0.9, 0.6, 0.8], "tested_shares": [1, 0.9, 0.27]}
    of_all = {"conditional_accept_rates": [0.9, 0.6, 0.4], "mean_accept_length": 2.656}
    assert rates(profile(tmp_path, harness=own, **of_all)) == (0.9, 0.6, 0.8)
    by_blocks = profile(tmp_path, conditional_accept_rates=None)
    found = rates(by_blocks)
    assert found is not None
    assert 1 + sum(marginal_rates(found, 4)) == pytest.approx(2.924887)


def test_a_profile_whose_mean_length_is_1_accepted_nothing(tmp_path: Path) -> None:
    never = profile(tmp_path, conditional_accept_rates=None, mean_accept_length=1.0)
    assert rates(never) == (0.0,)


@pytest.mark.parametrize("k", [4, "auto"])
def test_nan_is_no_rate(k: Any) -> None:
    with pytest.raises(SettingError, match=r"must be in \[0, 1\]"):
        rates(math.nan, k)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"measured": False}, "without a measurement"),
        ({"schema_version": None, "measured": None}, "without a measurement"),
        ({"measured": "no"}, "without a measurement"),
        ({"conditional_accept_rates": ["high"]}, "conditional_accept_rates that are no rates"),
        ({"conditional_accept_rates": [True, False, True]}, "that are no rates"),
        ({"conditional_accept_rates": [1.7]}, "rates in [0, 1]"),
        (
            {"conditional_accept_rates": None, "mean_accept_length": 0.9},
            "a mean_accept_length of 0.9",
        ),
        (
            {"conditional_accept_rates": None, "mean_accept_length": math.nan},
            "mean_accept_length of nan",
        ),
    ],
)
def test_what_is_no_measurement_is_refused(
    tmp_path: Path, changes: dict[str, Any], rule: str
) -> None:
    with pytest.raises(SettingError) as error:
        rates(profile(tmp_path, **changes))
    assert rule in str(error.value)


MARGINAL = [0.816082, 0.633750, 0.475053]


def test_marginal_rates_alone_are_enough(tmp_path: Path) -> None:
    found = rates(profile(tmp_path, conditional_accept_rates=None, marginal_accept_rates=MARGINAL))
    assert found == pytest.approx((0.816082, 0.776577, 0.749591), abs=1e-5)
    never = {"mean_accept_length": 1, "marginal_accept_rates": [0, 0]}
    assert rates(profile(tmp_path, conditional_accept_rates=None, **never)) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"marginal_accept_rates": [0.5, 0.25, 0.12]}, "marginal_accept_rates and conditional"),
        ({"marginal_accept_rates": MARGINAL[:2]}, "marginal_accept_rates and conditional"),
        ({"mean_accept_length": 5}, "a mean_accept_length of 5, and 2.925 by its rates"),
        ({"mean_accept_length": True}, "a mean_accept_length of True"),
        ({"mean_accept_length": 10**400}, "a mean_accept_length of 1000"),
        (
            {
                "conditional_accept_rates": None,
                "marginal_accept_rates": [0.1, 0.9],
                "mean_accept_length": 2,
            },
            "marginal_accept_rates that rise",
        ),
        (
            {
                "marginal_accept_rates": MARGINAL,
                "harness": {"accept_rates_of_tested": [1.0, 1.0, 1.0]},
            },
            "accept_rates_of_tested that differ from marginal_accept_rates",
        ),
        (
            {"harness": {"accept_rates_of_tested": [1.0] * 3, "tested_shares": [1.0, 0.8, 0.6]}},
            "accept_rates_of_tested that differ",
        ),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], rule: str
) -> None:
    """Whichever figure was edited, another one would be taken without a word."""
    with pytest.raises(SettingError) as error:
        rates(profile(tmp_path, **changes))
    assert rule in str(error.value)
    assert "speculation_profile.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_rates_of_prefixes_repeat_the_last_and_end_with_k() -> None:
    assert marginal_rates((0.5,), 3) == [0.5, 0.25, 0.125]
    assert marginal_rates((0.8, 0.5), 3) == pytest.approx([0.8, 0.4, 0.2])
    assert marginal_rates((0.8, 0.5, 0.1), 1) == [0.8]
