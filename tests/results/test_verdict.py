from __future__ import annotations

import pytest

from harness.results.rows.latency import LatencyRow
from harness.results.work import Work, judged, no_verdict, too_many_failures, why_no_verdict


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        ((0, 0), None),
        ((2, 2), None),
        ((3, 3), "3 of 200 regular requests failed and 3 of 200 speculative requests failed"),
        ((1, 0), "1 of 200 regular requests failed and 0 of 200 speculative requests failed"),
    ],
)
def test_failures_are_tolerated_up_to_one_per_cent_and_if_equal(
    failed: tuple[int, int], said: str | None
) -> None:
    regular, speculative = failed
    arms = Work("regular", 200, regular, 1600), Work("speculative", 200, speculative, 1600)
    assert too_many_failures(arms) == said
    assert no_verdict(*arms) == said


def test_a_tenth_more_tokens_is_other_work() -> None:
    regular = Work("regular", 9, 0, 1000)
    assert no_verdict(regular, Work("speculative", 9, 0, 900)) is None
    reason = "the arms did not do the same work: regular generated 1000 tokens, speculative 899"
    assert no_verdict(regular, Work("speculative", 9, 0, 899)) == reason
    assert no_verdict(Work("regular", 9, 0, 899), Work("speculative", 9, 0, 1000)) is not None


def test_rows_of_such_arms_lose_their_speedup() -> None:
    def rows(num_tokens: int) -> list[LatencyRow]:
        regular = LatencyRow(arm="regular", num_prompts=9, num_tokens=80)
        other = LatencyRow(
            arm="speculative",
            num_prompts=9,
            num_tokens=num_tokens,
            speedup=2.0,
            speedup_low=1.9,
            decode_speedup=2.0,
        )
        return [regular, other]

    assert judged(rows(80)) == rows(80)
    _, row = judged(rows(30))
    assert (row.speedup, row.speedup_low, row.num_tokens) == (None, None, 30)
    assert row.decode_speedup is None
    assert why_no_verdict(rows(80)[:1]) is None
