"""`speculation_profile.json` has NVIDIA's figures, and the intervals that it lacks."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.commands.latency.figures.acceptance import (
    MeasuredAcceptance,
    lengths_by_num_draft_tokens,
)
from harness.commands.latency.speculation_profile import speculation_profile
from harness.config.errors import SettingError
from harness.config.synthetic import rates_of_profile
from harness.results.acceptance import Acceptance


def measured(*requests: list[tuple[int, int]], categories: Any = None) -> MeasuredAcceptance:
    known = categories or [None] * len(requests)
    return MeasuredAcceptance([Acceptance.of(request) for request in requests], known)


def profile(of: MeasuredAcceptance, **changes: Any) -> dict[str, Any]:
    return speculation_profile(of, **({"is_block": False} | changes))


def from_histogram(lengths: Mapping[int, int], k: int) -> MeasuredAcceptance:
    outcomes = [(k, length - 1) for length, times in lengths.items() for _ in range(times)]
    return measured(outcomes)


def test_rates_are_those_of_the_schema() -> None:
    found = profile(from_histogram({1: 40, 2: 30, 3: 30}, 3))
    assert found["schema_version"] == "1.0"
    assert found["measured"] is True
    assert found["num_speculative_tokens"] == 3
    assert found["marginal_accept_rates"] == [0.6, 0.3, 0.0]
    assert found["conditional_accept_rates"] == [0.6, 0.5, 0.0]
    assert found["mean_accept_length"] == 1.9
    assert found["acceptance_length_histogram"] == {"1": 40, "2": 30, "3": 30}
    assert found["validation"]["mean_consistency"]["passed"]
    assert found["validation"]["marginal_monotonicity"]["passed"]


def test_a_published_histogram_gives_the_published_length() -> None:
    """MiniMax-M2.7 with DFlash, from the pull request: 2.4733 over steps."""
    found = profile(from_histogram({1: 8611, 2: 7814, 3: 5337, 4: 8891}, 3))
    assert found["mean_accept_length"] == pytest.approx(2.4733, abs=5e-5)


def test_lengths_over_steps_and_over_requests_stand_side_by_side() -> None:
    found = profile(measured([(2, 2)] * 9, [(2, 0)]))
    assert found["mean_accept_length"] == pytest.approx(2.8)
    assert found["mean_accept_length_per_request"] == pytest.approx(2.0)


def test_proposals_that_end_early_are_no_rejections_where_we_say_tested() -> None:
    found = profile(measured([(2, 2), (1, 1)]))
    assert found["harness"]["accept_rates_of_tested"] == [1.0, 1.0]
    assert found["conditional_accept_rates"] == [1.0, 0.5]
    assert found["harness"]["tested_shares"] == [1.0, 0.5]
    assert found["marginal_accept_rates"] == [1.0, 0.5]


def test_our_own_profiles_do_not_contradict_themselves(tmp_path: Path) -> None:
    drawn = random.Random(2)
    for most in (1, 4, 9):
        proposed = [drawn.randint(1, most) for _ in range(40)]
        found = profile(measured([(number, drawn.randint(0, number)) for number in proposed]))
        file = tmp_path / "speculation_profile.json"
        file.write_text(json.dumps(found))
        assert list(rates_of_profile(str(file))) == found["harness"]["accept_rates_of_tested"]
        edited = found | {
            "marginal_accept_rates": [0.5 * r for r in found["marginal_accept_rates"]]
        }
        file.write_text(json.dumps(edited))
        with pytest.raises(SettingError, match=r"speculation_profile\.json"):
            rates_of_profile(str(file))


def test_levels_of_trees_are_the_positions() -> None:
    outcomes = [Acceptance.of([(16, 2), (16, 1), (9, 0)])]
    tree = MeasuredAcceptance(outcomes, [None], num_levels=2, extrapolates=False)
    found = profile(tree)
    assert found["num_speculative_tokens"] == 2
    assert found["marginal_accept_rates"] == pytest.approx([2 / 3, 1 / 3], abs=1e-6)
    assert found["validation"]["mean_consistency"]["passed"]
    # A tree of one level is not the beginning of this one.
    assert lengths_by_num_draft_tokens(tree) is None


def test_blocks_have_no_rates_by_position() -> None:
    blocks = dataclasses.replace(from_histogram({1: 40, 2: 30}, 2), extrapolates=False)
    found = profile(blocks, is_block=True)
    assert found["verification_method"] == "block"
    assert found["accept_length_model"] == "measured_per_k"
    assert found["conditional_accept_rates"] is None
    assert found["marginal_accept_rates"] is None
    assert "longest-prefix" in found["vectors_unavailable_reason"]
    assert found["acceptance_length_histogram"]


def test_categories_have_their_own_lengths() -> None:
    found = profile(measured([(2, 2)], [(2, 0)], categories=["code", "chat"]))
    assert found["per_category"]["code"]["mean_accept_length"] == 3
    assert found["per_category"]["chat"]["mean_accept_length"] == 1


def test_intervals_are_over_prompts_and_hold_the_estimate() -> None:
    drawn = random.Random(1)
    requests = [[(3, drawn.randint(0, 3)) for _ in range(20)] for _ in range(12)]
    found = profile(measured(*requests))
    intervals = found["harness"]["intervals_95"]
    assert intervals["covers"] == "12 prompts"
    low, high = intervals["mean_accept_length"]
    assert low < found["mean_accept_length"] < high
    for rate, (low, high) in zip(
        found["marginal_accept_rates"], intervals["marginal_accept_rates"], strict=True
    ):
        assert low < rate < high


def test_the_interval_of_a_length_allows_for_rare_texts() -> None:
    """15 prompts of 63 tokens, few of which need many iterations; a bootstrap misses in 11 %."""
    rng = np.random.default_rng(0)
    num_iterations = 8 + rng.gamma(0.5, 4, (500, 15)).round().astype(int)
    missed = 0
    for of_run in num_iterations:
        found = measured(*[[(62, 63 - number)] + (number - 1) * [(62, 0)] for number in of_run])
        missed += found.length_with(62).excludes(63 / num_iterations.mean())
    assert 0.02 < missed / 500 < 0.08


def test_few_prompts_have_no_interval() -> None:
    few = measured([(2, 1)], [(2, 2)])
    assert profile(few)["harness"]["intervals_95"]["mean_accept_length"] is None
    lengths = lengths_by_num_draft_tokens(few)
    assert lengths is not None
    assert [length.estimate for length in lengths] == [2.0, 2.5]
    assert not any(length.has_bounds for length in lengths)


def test_nothing_drafted_has_no_lengths() -> None:
    assert lengths_by_num_draft_tokens(measured([], [(0, 0)])) is None
