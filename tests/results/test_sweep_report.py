"""What a sweep says of its jobs, from rows as they stand in its file."""

from __future__ import annotations

import pytest

from harness.results.recovery_report import summarise
from harness.results.report.cells import typed
from harness.results.sweep_report import exit_code, job_line


def check(job: str, prompt_index: str, verdict: str, status: str = "ok") -> dict[str, str]:
    """A sampled check as text, with what `summarise` reads of it."""
    return {
        "job": job, "status": status, "error": "", "check": "sampled", "prompt_index": prompt_index,
        "verdict": verdict, "lossy": "False", "lenience": "1.0", "num_draft_tokens": "4", "num_draws": "1000",
        "power": "0.5", "shift": "0.05", "p_value": "0.5", "num_prompts": "1", "num_tokens": "6",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("together", "one", "expected"),
    [("lossless", "undecided", 0), ("undecided", "lossless", 3), ("lossless", "lossy", 1)],
)
def test_a_job_has_the_verdict_that_its_run_had(together: str, one: str, expected: int) -> None:
    """A prompt alone need not decide anything, as in a run that is no job of a sweep."""
    rows = [check("0", "0", one), check("0", "", together)]
    verdict = summarise([typed(row) for row in rows]).verdict
    assert job_line("recovery", rows) == verdict
    assert exit_code("recovery", rows) == expected == {"lossless": 0, "undecided": 3, "lossy": 1}[verdict]


def test_the_worst_job_decides() -> None:
    good, doubtful, bad = (check(str(n), "", v) for n, v in enumerate(("lossless", "undecided", "lossy")))
    assert exit_code("recovery", [good, doubtful]) == 3
    assert exit_code("recovery", [good, doubtful, bad]) == 1
    assert exit_code("recovery", [good, check("3", "", "lossless", status="failed")]) == 1
