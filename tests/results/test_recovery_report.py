"""The verdict over all checks, and what is printed of it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.results.recovery_report import print_report, summarise

RUN = {
    "model": "tiny", "draft": "tiny_draft", "devices": "cpu", "prompts": "tiny", "top_k": 0, "top_p": 1.0,
    "lossy": False, "lenience": 1.0, "dtype": "float32", "quantization": "none", "seed": 0,
    "fault": "none", "status": "ok",
    "false_alarm_rate": 1e-9, "num_draft_tokens": 4,
}  # fmt: skip
GREEDY = {
    "check": "greedy", "prompt_index": None, "temperature": 0.0, "verdict": "lossless", "num_prompts": 15,
    "num_tokens": 960,
    "identical_prompts": 15, "divergence_position": None, "logit_margin": None, "logit_tolerance": None,
}  # fmt: skip
SAMPLED = {
    "check": "sampled", "temperature": 0.5, "verdict": "lossless", "prompt_index": 3, "num_tokens": 6,
    "num_draws": 25_000,  "statistic": 27.0, "degrees_of_freedom": 29, "p_value": 0.57,
    "significance_level": 2.5e-11,
    "shift": 0.05, "power": 0.9995, "rounding": 0.0, "acceptance_rate": 0.7,
}  # fmt: skip


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The greedy check, one prompt's, and that of all together, each with its changes."""
    checks = [GREEDY, SAMPLED, SAMPLED | {"prompt_index": None, "num_prompts": 15}]
    return [{**RUN, **check, **(changes[i] if i < len(changes) else {})} for i, check in enumerate(checks)]


def test_lossless_needs_every_check() -> None:
    summary = summarise(rows())
    assert summary.verdict == "lossless"
    assert "15 of 15 prompts (960 tokens)" in summary.sentence
    assert "25,000 sampled continuations follow the target's exact distribution" in summary.sentence


@pytest.mark.parametrize("number", range(3))
def test_one_loss_is_a_loss(number: int) -> None:
    changes: list[dict[str, Any]] = [{}, {"verdict": "undecided"}, {"verdict": "undecided"}]
    changes[number] = {"verdict": "lossy", "p_value": 0.0}
    assert summarise(rows(*changes)).verdict == "lossy"


def test_undecided_says_what_is_missing() -> None:
    weak = {"verdict": "undecided", "power": 0.43}
    assert summarise(rows({}, weak)).verdict == "lossless"  # what one prompt cannot tell, all together can
    summary = summarise(rows({}, weak, weak))
    assert summary.verdict == "undecided"
    assert "raise num_draws" in summary.in_short
    assert "43.0 %" in summary.in_short


def test_lenience_is_lossy_whatever_was_seen() -> None:
    lenient = {"lossy": True, "lenience": 0.9}
    summary = summarise(rows(lenient, lenient, lenient))
    assert summary.verdict == "lossy"
    assert "lenience 0.9 is lossy by definition" in summary.sentence


def test_the_printed_report(capsys: pytest.CaptureFixture[str]) -> None:
    parted = {"identical_prompts": 14, "divergence_position": 7, "logit_margin": -0.1, "logit_tolerance": 0.3}
    print_report(rows(parted | {"dtype": "bfloat16"}, {"rounding": 25.0}))
    printed = " ".join(capsys.readouterr().out.split())
    assert "within the rounding of bfloat16, 0.3" in printed
    assert "χ² 27.0, df 29" in printed
    assert "in at most 1e-09 of such runs" in printed
    assert "a χ² of up to 25 down to the rounding" in printed
    print_report(rows({"fault": "lenience"}, {"verdict": "lossy", "p_value": 0.0}))
    printed = " ".join(capsys.readouterr().out.split())
    assert "fault=lenience was planted" in printed
    assert "fail 1 of 2 tests" in printed
    print_report(rows({"status": "interrupted"}))
    assert "no verdict follows" in capsys.readouterr().out
