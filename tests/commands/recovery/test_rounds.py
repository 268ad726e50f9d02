"""The same questions again: when acceptance has fallen, and what a page says of rounds."""

from __future__ import annotations

from typing import Any

import pytest

from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.scored import Drafts, has_fallen
from harness.commands.recovery.tables import Checks, recovery_page
from harness.results.runs import Run
from pages import full, short
from wording import mentions


def drafts(*accepted: int) -> Drafts:
    """Of greedy questions, each with ten draft tokens."""
    return {((number,), 8): (10, each) for number, each in enumerate(accepted)}


@pytest.mark.parametrize(
    ("later", "fell"),
    [
        (drafts(*[6] * 15), False),
        # Rounding moves a few, in either direction.
        (drafts(*[6] * 10, 5, 7, 5, 7, 5), False),
        (drafts(*[9] * 15), False),
        (drafts(*[0] * 15), True),
        (drafts(*[5] * 13, 7, 6), True),
        ({}, False),
    ],
)
def test_acceptance_has_fallen_if_most_questions_say_so(later: Drafts, fell: bool) -> None:
    assert has_fallen(drafts(*[6] * 15), later, 1e-2) == fell


def row(**figures: Any) -> RecoveryRow:
    common: dict[str, Any] = {
        "run": "1", "model": "tiny", "draft": "tiny_draft", "status": "ok", "batch_size": 8, "shift": 0.05,
        "false_alarm_rate": 1e-9, "arm": "speculative", "fault": "none", "lossy": False, "lenience": 1.0,
        "num_prompts": 15, "identical_prompts": 15, "verdict": "lossless",
    }  # fmt: skip
    return RecoveryRow(**common | figures)


def test_the_round_in_which_a_loss_began_is_named() -> None:
    rows = [
        row(check="greedy"),
        row(check="round", round=2, num_requests=400, elapsed_s=60.0),
        row(check="round", round=3, num_requests=800, elapsed_s=120.0, verdict="lossy"),
    ]
    summary = Checks(rows)
    assert summary.verdict == "lossy"
    assert mentions(summary.in_short, "after 800 requests", "2 min", "answered wrongly")
    assert mentions(full(recovery_page([Run(rows)])), "2.0", "800", "15 of 15", "lossy")
    assert "1 further round as the first" in Checks(rows[:2]).findings


def test_a_fall_of_acceptance_is_a_doubt_and_no_loss() -> None:
    fallen = {"acceptance_rate": 0.02, "finding": "acceptance was 62%"}
    rows = [row(check="greedy"), row(check="round", num_requests=400, elapsed_s=60.0, **fallen)]
    assert Checks(rows).verdict == "lossless"
    shown = short(recovery_page([Run(rows)]))
    assert mentions(shown, "Acceptance of the same questions fell", "400 requests", "2%", "62%")
