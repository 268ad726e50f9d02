"""The verdict over all checks of `recovery`, and what is printed and reported of it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import (
    Checks,
    recovery_page,
    verdict_lines,
)
from harness.results.runs import Run

RUN = {
    "run": "1", "model": "tiny", "draft": "tiny_draft", "devices": "cpu", "prompts": "tiny", "top_k": 0, "top_p": 1.0,
    "lossy": False, "lenience": 1.0, "dtype": "float32", "quantization": "none", "seed": 0, "arm": "speculative",
    "fault": "none", "status": "ok", "batch_size": 8, "false_alarm_rate": 1e-9, "num_draft_tokens": 4, "shift": 0.05,
}  # fmt: skip
GREEDY = {
    "check": "greedy", "temperature": 0.0, "verdict": "lossless", "num_prompts": 15, "num_tokens": 960,
    "identical_prompts": 15,
}  # fmt: skip
SAMPLED = {
    "check": "sampled", "temperature": 0.5, "verdict": "lossless", "num_draws": 25_000, "evidence": 0.244,
    "p_value": 0.57,
    "power": 0.9995, "rounding": 0.0, "acceptance_rate": 0.7,
}  # fmt: skip


LOSSY = {"verdict": "lossy", "p_value": 0.0, "num_draws_until": 712}


def rows(*changes: dict[str, Any], **of_all: Any) -> list[RecoveryRow]:
    """The greedy check and that of all draws, each with its changes."""
    checks = [GREEDY, SAMPLED]
    return [
        RecoveryRow(**(RUN | check | (changes[i] if i < len(changes) else {}) | of_all))
        for i, check in enumerate(checks)
    ]


@pytest.mark.parametrize("number", range(2))
def test_one_loss_is_a_loss(number: int) -> None:
    changes: list[dict[str, Any]] = [{}, {"verdict": "undecided"}]
    changes[number] = LOSSY
    assert Checks(rows(*changes)).verdict == "lossy"


def test_a_run_without_a_check_prints_nothing() -> None:
    assert recovery_page([Run([RecoveryRow(**(RUN | {"status": "failed"}))])]) is None


def test_losses_are_said_of_real_checks_alone() -> None:
    control = Checks(rows({}, LOSSY, fault="lenience"))
    assert verdict_lines([control]) == []
    (lossless,) = verdict_lines([control, Checks(rows())])
    assert lossless.text == "Lossless in every check: tiny with tiny_draft."
    (lossy,) = verdict_lines([Checks(rows({"verdict": "lossy"}))])
    assert lossy.text == "Lossy: tiny with tiny_draft."
