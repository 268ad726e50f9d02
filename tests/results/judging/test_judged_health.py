"""What is said of an engine against its weights, from planted rows."""

from __future__ import annotations

import pytest

from harness.commands.acceptance.health import health_in_words
from harness.results.judging.health import judged_health
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.statistics.interval import Interval

WEIGHTS = Interval(4.0, 3.7, 4.3)
FEWER = "the engine drafts fewer than K=4, or does not report what it accepted"


@pytest.mark.parametrize(
    ("health", "served", "relation", "why"),
    [
        ("as its weights say", 4.1, "open", ""),
        ("accepts less", 3.1, "below", ""),
        ("accepts more", 4.9, "above", ""),
        ("other texts", 3.1, "open", "its texts are not m's"),
        ("cannot tell", None, "open", "the engine does not report what it accepted"),
        ("cannot tell", 3.1, "open", FEWER),
    ],
)
def test_the_page_and_the_statement_have_one_reason(
    health: str, served: float | None, relation: str, why: str
) -> None:
    row = AcceptanceRow(
        model="m",
        num_draft_tokens=4,
        health=health,
        served_tokens_per_iteration=served,
        weights_tokens_per_iteration=WEIGHTS,
    )
    statement = judged_health(row)
    assert (statement.relation, statement.why, statement.interval) == (relation, why, WEIGHTS)
    assert (why if health == "cannot tell" else "") in health_in_words(row)


def test_limits_that_are_not_known_conclude_nothing() -> None:
    row = AcceptanceRow(health="accepts less", served_tokens_per_iteration=3.1)
    assert (judged_health(row).relation, judged_health(row).why) == ("open", "no interval")
