"""The same questions again: when acceptance has fallen."""

from __future__ import annotations

import pytest

from harness.commands.recovery.scored import Drafts, has_fallen


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
