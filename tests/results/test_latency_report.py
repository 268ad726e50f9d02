from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from harness.results.acceptance import Acceptance
from harness.results.latency_report import CategoryLine, LatencyReport, print_report, why_not

SHARED: dict[str, Any] = {
    "model": "30B", "draft": "7B", "devices": "NVIDIA A100", "batch_size": 1, "temperature": 0.5, "num_prompts": 15,
    "prompts": "english", "max_new_tokens": 64, "top_k": 0, "top_p": 1.0, "dtype": "float16", "quantization": "none",
    "test": False, "lossy": False, "lenience": 1.0, "status": "ok", "peak_memory_bytes": None, "tokens_per_second": 3.0,
    "runner": "eager",
    "time_to_first_token_ms": 400.0, "ms_per_token_std": 1.0,
}  # fmt: skip
REGULAR = SHARED | {"arm": "regular", "num_draft_tokens": None, "ms_per_token": 330.0, "speedup": None}
REGULAR |= {"target_step_ms": 320.0}
SPECULATIVE = SHARED | {
    "arm": "speculative", "num_draft_tokens": 4, "ms_per_token": 180.0, "speedup": 1.83, "speedup_low": 1.7,
    "speedup_high": 1.95, "draft_ms": 280.0, "verify_ms": 330.0, "iteration_ms": 630.0, "predicted_speedup": 1.9,
}  # fmt: skip
ACCEPTANCE = Acceptance.of([(4, 4), (4, 2), (4, 3), (4, 1)])


class Parted(NamedTuple):
    position: int
    logit_margin: float


def printed(capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    rows = [REGULAR | changes.get("both", {}), SPECULATIVE | changes.get("both", {}) | changes.get("row", {})]
    print_report(LatencyReport(rows, ACCEPTANCE, changes.get("categories", []), changes.get("divergences", [])))
    return capsys.readouterr().out


def test_a_gain_comes_with_interval_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert "30B with draft 7B on NVIDIA A100" in text
    assert "Speculative decoding is 1.83× faster (95 % interval 1.70 to 1.95)." in text
    assert "62.5% of the draft tokens" in text
    assert "630.00 ms = drafting 280.00 + verifying 330.00 + rest 20.00" in text
    assert "3.50 / (4.00 × 0.219 + 1.03) = 1.90×; measured is 96% of it" in text
    assert "why" not in text


def test_a_loss_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, row={"speedup": 0.8, "speedup_low": 0.7, "speedup_high": 0.9, "draft_ms": 1200.0})
    assert "does not pay here: 0.80×" in text
    assert "the draft is too slow" in text


def test_no_difference_is_not_called_a_gain(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, row={"speedup": 1.05, "speedup_low": 0.97, "speedup_high": 1.12})
    assert "no sure difference" in text


@pytest.mark.parametrize(
    ("length", "draft", "verify", "cause"),
    [
        (3.5, 0.9, 1.1, "the draft is too slow"),
        (3.5, 0.1, 4.0, "verification is too dear"),
        (1.2, 0.1, 1.1, "acceptance is too low"),
    ],
)
def test_the_cause_is_the_ideal_that_would_help_most(length: float, draft: float, verify: float, cause: str) -> None:
    predicted = length / (4 * draft + verify)
    assert why_not(predicted, length, draft, verify, 4).startswith(cause)


def test_categories_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [CategoryLine("story", 9, 2.5, ACCEPTANCE), CategoryLine("sum", 6, 1.1, Acceptance.of([(4, 0)]))]
    text = printed(capsys, categories=lines)
    assert [word in text for word in ("story", "2.50×", "sum", "1.10×", "0.0%")] == [True] * 5
    assert "story" not in printed(capsys, categories=lines[:1]), "one category says nothing new"


def test_greedy_texts_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert "identical token for token on 2 of 2 prompts" in printed(capsys, divergences=[None, None])
    text = printed(capsys, divergences=[None, Parted(17, 0.002), Parted(5, -0.0004)])
    assert "identical on 1 of 3 prompts" in text
    assert "at token 5" in text
    assert "margin at a difference is 0.002" in " ".join(text.split())


def test_what_limits_the_numbers_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, both={"lossy": True, "lenience": 0.5, "test": True, "status": "interrupted"})
    assert "speculative (lossy)" in text
    assert "lenience 0.5" in text
    assert "test=true" in text
    assert "interrupted: the figures cover 15 prompts only" in text


def test_the_roof_is_not_clamped(capsys: pytest.CaptureFixture[str]) -> None:
    roof = {"step_bytes": 65_000_000_000, "floor_ms": 40.0}
    text = " ".join(printed(capsys, both=roof).split())
    assert "target reads 65.00 GB a step; from memory, at the 1625 GB/s of a large copy here, 40.00 ms at least" in text
    assert "a step takes 320.00 ms, 12% of that rate" in text
    assert "draft reads" not in text
    draft = {"draft_step_bytes": 14_000_000, "draft_floor_ms": 140.0, "mean_proposed": 4.0}
    text = " ".join(printed(capsys, both=roof, row=draft).split())
    assert "14.0 MB a step" in text
    assert "a step takes 70.00 ms, 200% of that rate (above 100%: caches hold much of it)" in text
    assert "reads" not in printed(capsys, both=roof | {"floor_ms": None})
