"""The answer that a run of `latency` prints: short at any width, and the same verdict as anywhere else."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from harness.commands.latency.tables.answer import page_of_run
from harness.config.machine import note_command_line
from harness.reporting.table import Bar, Bars
from harness.reporting.terminal import print_document
from pages import short
from report_files import latency_run

FIGURES: dict[str, Any] = {
    "num_tokens": 960, "iteration_ms": 630.0, "mean_proposed": 4.0, "acceptance_rate": 0.625,
    "mean_num_draft_tokens": 4.0, "tokens_per_iteration": 3.5,
    "mean_acceptance_length": 3.5, "draft_ms": 80.0, "verify_ms": 330.0, "predicted_speedup": 1.9, "speedup": 1.83,
    "speedup_low": 1.7, "speedup_high": 1.95, "speedup_covers": "15 prompts", "processor_share": 1.0,
    "ignore_eos": True, "tokens_per_iteration_by_num_draft_tokens": [1.9, 2.6, 3.1, 3.5], "visible_difference": 0.05,
}  # fmt: skip


def answer(width: int = 80, arguments: str = "latency", **changes: Any) -> str:
    note_command_line(arguments.split())
    regular, speculative = latency_run(**FIGURES | changes)
    costs = dict.fromkeys(
        ("draft_ms", "verify_ms", "mean_acceptance_length", "tokens_per_iteration")
    )
    rows = [dataclasses.replace(regular, target_step_ms=320.0, **costs), speculative]
    return short(page_of_run(rows), width)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_it_fits_thirteen_lines_and_bars_are_aligned(width: int, share: float) -> None:
    text = answer(width, processor_share=share)
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert len(text.splitlines()) <= 13
    regular, speculative = (line for line in text.splitlines() if "ms/token" in line)
    assert regular.index("ms/token") == speculative.index("ms/token")
    assert width < 80 or "first token 400.0 ms" in regular
    assert regular.count("█") > 1.5 * speculative.count("█") > 0


def test_a_command_is_never_cut_in_two() -> None:
    typed = "latency model=some/long-name prompts=./my-chats.jsonl"
    text = answer(arguments=typed)
    assert f"\n           harness {typed} K=8\n" in text
    assert len(text.splitlines()) <= 13


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("latency -K 4", "harness latency K=8"),
        ("latency -m K=2,4", "the same with K=8"),
        ("latency --K=4 seed=1", "harness latency seed=1 K=8"),
        ("latency -T 0 --num-draft-tokens 4 --details seed=1", "harness latency -T 0 seed=1 K=8"),
        ("latency gamma=4 --max-new-tokens -1", "harness latency --max-new-tokens -1 K=8"),
        ("latency --details -- llama-server -K 4", "harness latency K=8 -- llama-server -K 4"),
    ],
)
def test_what_is_typed_next_replaces_a_setting_however_it_was_typed(
    typed: str, expected: str
) -> None:
    assert f" {expected}\n" in f"{answer(arguments=typed)}\n"


def test_a_run_that_failed_at_once_has_no_answer() -> None:
    assert page_of_run(latency_run(status="failed", error="killed")) is None


def test_bars_are_plain_where_letters_are() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    bars = Bars((Bar("a", 2.0, ("2",)), Bar("b", 1.0, ("1",))))
    print_document([bars], Console(file=stream, width=40))
    stream.flush()
    text = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert text.count("#") == 36
