"""The verdict of `recovery` as a statement."""

from __future__ import annotations

import pytest

from harness.commands.recovery.record import Recovery
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import judged_output, recovery_page
from harness.results.runs import Run

GREEDY = RecoveryRow(
    run="r", status="ok", check="greedy", verdict="lossless", num_prompts=15, identical_prompts=15
)
DRAWN = {"check": "draws", "verdict": "undecided"}
OF_A_SHIFT = "would see a shift of 10 % between parts of their distribution with a chance"
OF_NO_SHIFT = OF_A_SHIFT.replace("10 %", "0 %")
IDENTICAL = "15 of 15 greedy texts identical"


@pytest.mark.parametrize(
    ("changes", "relation", "reason", "exit_code"),
    [
        ({}, "lossless", IDENTICAL, None),
        ({"verdict": "lossy"}, "lossy", IDENTICAL, 1),
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
        (
            {**DRAWN, "num_draws": 900, "shift": 0.1, "power": 0.4, "rounding": 0.04},
            "open",
            f"900 drawn tokens {OF_A_SHIFT} of at least 40.0 % only; raise num_draws or shift",
            3,
        ),
        (
            {**DRAWN, "num_draws": 900, "shift": 0.1, "power": 0.4, "rounding": 0.05},
            "open",
            "rounding (0.05) is nearly as large as the shift (0.1) that is to be seen: a larger shift= can be tested,"
            " or the engine in float32",
            3,
        ),
        (
            {
                **DRAWN,
                "num_draws": 900,
                "shift": 0.1,
                "power": 0.4,
                "rounding": 0.09,
                "num_draws_needed": 2_000,
            },
            "open",
            f"900 drawn tokens {OF_A_SHIFT} of at least 40.0 % only; at least num_draws=2000 is needed",
            3,
        ),
        (
            {**DRAWN, "num_draws": 900, "shift": 0.1, "power": 0.4, "evidence": 3.0},
            "open",
            "900 drawn tokens are evidence of 1 to 1,000 against the target's distribution, not yet decisive;"
            " raise num_draws or shift",
            3,
        ),
        (
            DRAWN,
            "open",
            f"0 drawn tokens {OF_NO_SHIFT} of at least 0.0 % only; raise num_draws or shift",
            3,
        ),
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


def test_the_check_that_sees_least_is_named() -> None:
    found = [
        RecoveryRow.from_values({**GREEDY.values(), **DRAWN, "power": power})
        for power in (0.5, None, 0.2)
    ]
    assert "a chance of at least 0.0 % only" in judged_output(found, "").why
