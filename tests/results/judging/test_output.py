"""The verdict of `recovery` as a statement."""

from __future__ import annotations

import pytest

from harness.commands.recovery.record import Recovery
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import recovery_page
from harness.results.runs import Run

GREEDY = RecoveryRow(
    run="r", status="ok", check="greedy", verdict="lossless", num_prompts=15, identical_prompts=15
)
IDENTICAL = "15 of 15 greedy texts identical"


@pytest.mark.parametrize(
    ("changes", "relation", "reason", "exit_code"),
    [
        ({}, "lossless", IDENTICAL, None),
        ({"verdict": "lossy"}, "lossy", IDENTICAL, 1),
        (
            {"verdict": "lossy", "fault": "lenience"},
            "lossy",
            f"a control, fault=lenience was planted, which the checks must find: {IDENTICAL}",
            1,
        ),
        (
            {"lossy": True, "lenience": 0.5},
            "lossy",
            "lenience 0.5 is lossy by definition, although these checks do not show it",
            1,
        ),
        (
            {"verdict": "undecided"},
            "open",
            "greedy texts differ, and no logits say whether rounding explains it",
            3,
        ),
        ({"status": "interrupted"}, "open", "interrupted", None),
    ],
)
def test_a_run_has_one_statement_with_its_reason(
    changes: dict[str, object], relation: str, reason: str, exit_code: int | None
) -> None:
    row = RecoveryRow.from_values({**GREEDY.values(), **changes})
    page = recovery_page([Run([row])])
    (statement,) = page.statements
    assert (statement.relation, statement.reason, statement.figure) == (relation, reason, "output")
    assert statement.why == (reason if relation == "open" else "")
    bad_answer = Recovery().bad_answer([row])
    assert (bad_answer and bad_answer.exit_code) == exit_code
