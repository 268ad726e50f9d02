"""The printed result of one run of `latency`, short at any width and in full, and what is said of several."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.commands.latency.costs import StepCosts, held_back, main_limit
from harness.commands.latency.figures import Category, categories_of
from harness.commands.latency.page import latency_page
from harness.commands.report.command import build
from harness.config.command_line import Words
from harness.measuring.rows import LatencyRow
from harness.reporting.files import html_page
from harness.results.files import append_rows
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from in_process import Harness
from pages import findings, short
from report_files import latency_run, over, prompt_rows

FIGURES: dict[str, Any] = {
    "num_tokens": 960, "iteration_ms": 630.0, "mean_proposed": 4.0, "acceptance_rate": 0.625,
    "mean_num_draft_tokens": 4.0, "tokens_per_iteration": 3.5,
    "mean_acceptance_length": 3.5, "draft_ms": 80.0, "verify_ms": 330.0, "predicted_speedup": 1.9, "speedup": 1.83,
    "speedup_low": 1.7, "speedup_high": 1.95, "speedup_covers": over(15), "processor_share": 1.0,
    "ignore_eos": True,
}  # fmt: skip


def answer(width: int = 80, arguments: str = "latency", **changes: Any) -> str:
    Words.divide(arguments.split()).note()
    regular, speculative = latency_run(**FIGURES | changes)
    costs = dict.fromkeys(
        ("draft_ms", "verify_ms", "mean_acceptance_length", "tokens_per_iteration")
    )
    rows = [dataclasses.replace(regular, target_step_ms=320.0, **costs), speculative]
    return short(latency_page([Run(rows)]), width)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_it_fits_fourteen_lines_and_has_bars(width: int, share: float) -> None:
    text = answer(width, processor_share=share)
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert len(text.splitlines()) <= 14
        assert "first token ms" in text
    regular, speculative = (line for line in text.splitlines() if "█" in line)
    assert regular.count("█") > 1.5 * speculative.count("█") > 0


def test_a_command_is_never_cut_in_two() -> None:
    typed = "latency model=some/long-name prompts=./my-chats.jsonl decoding=greedy decoding.max_new_tokens=256"
    text = answer(arguments=typed)
    assert f"\n           harness {typed} -m K=2,4,8\n" in text
    assert len(text.splitlines()) <= 14


def test_a_run_that_failed_at_once_has_no_answer() -> None:
    assert latency_page([Run(latency_run(status="failed", error="killed"))]) is None


RUN: dict[str, Any] = {
    "model": "30B", "num_tokens": 960, "ms_per_token_std": 1.0, "draft_ms": 280.0, "verify_ms": 330.0,
    "iteration_ms": 630.0, "predicted_speedup": 1.9, "speedup_low": 1.7, "speedup_high": 1.95, "mean_proposed": 4.0,
    "mean_num_draft_tokens": 4.0,
    "acceptance_rate": 0.625, "conditional_acceptance_rate": 10 / 13, "mean_acceptance_length": 3.5,
    "tokens_per_iteration": 3.5,
    "acceptance_by_position": [1.0, 0.75, 2 / 3, None], "acceptance_histogram": [0, 1, 1, 1, 1],
}  # fmt: skip


def rows_of_run(**changes: Any) -> list[LatencyRow]:
    regular, speculative = latency_run(**{"speedup": 1.83} | RUN | changes)
    alone = dict.fromkeys(
        ("draft_ms", "verify_ms", "speedup", "mean_acceptance_length", "tokens_per_iteration")
    )
    return [dataclasses.replace(regular, target_step_ms=320.0, **alone), speculative]


@pytest.mark.parametrize(
    ("length", "draft", "verify", "cause"),
    [
        (3.5, 0.9, 1.1, "the draft is too slow"),
        (3.5, 0.1, 4.0, "verification costs too much"),
        (1.2, 0.1, 1.1, "acceptance is too low"),
    ],
)
def test_the_cause_is_the_ideal_that_would_help_most(
    length: float, draft: float, verify: float, cause: str
) -> None:
    assert main_limit(length, 4, StepCosts(draft, verify)).startswith(f"{cause}: ")


@pytest.mark.parametrize(
    ("device", "draft_runner", "cause"),
    [
        ("cuda:0", "eager", "this program launches each kernel of the draft alone"),
        ("cuda:0", "static", "the draft is too slow"),
        ("cpu", "eager", "the draft is too slow"),
    ],
)
def test_the_time_of_launches_is_not_the_drafts(device: str, draft_runner: str, cause: str) -> None:
    pair = rows_of_run(weight_bytes={device: 1}, draft_runner=draft_runner)
    assert (held_back(*pair) or "").startswith(f"{cause}: ")


def rivals_of(directory: Path, num_prompts: int = 15, *, factor: float, **changes: Any) -> str:
    """The findings about two drafts: `lookup` takes `factor` times as long as `tiny_draft`."""
    rng = np.random.default_rng(0)
    hardness = rng.lognormal(3, 0.4, num_prompts)
    for draft, scale in (("tiny_draft", 1.0), ("lookup", factor)):
        run = latency_run(draft=draft, draft_method=draft, speedup=2.0 / scale, **changes)
        times = hardness * scale * np.exp(rng.normal(0, 0.05, num_prompts))
        append_rows(directory / "latency.csv", run)
        named = [("story", float(time)) for time in times]
        append_rows(directory / "latency_prompts.csv", prompt_rows(run, named))
    return " ".join(line.text for line in findings(build([directory])))


def test_methods_that_cannot_be_told_apart_are_named(tmp_path: Path) -> None:
    alike = rivals_of(tmp_path / "alike", factor=1.005)
    assert "Cannot be told apart from" in alike
    assert "significantly" not in alike
    apart = rivals_of(tmp_path / "apart", factor=1.5)
    assert "Fastest: 13B with tiny_draft" in apart
    assert "0.66 (0.64 to 0.69) of its speed-up" in apart
    assert "15 prompts" in apart
    assert "0.67 (0.58 to 0.77) of its speed-up (simultaneous 95 % intervals)." in rivals_of(
        tmp_path / "few", 5, factor=1.5
    )


def test_whiskers_say_what_the_verdicts_say(tmp_path: Path) -> None:
    """Alone three of four would pay; among them none is shown to."""
    near = ((1.08, 0.07), (1.07, 0.065), (1.06, 0.059), (1.05, 0.06))
    far = ((2.0, 0.1), (0.5, 0.05), (1.0, 0.1))
    expected = (["over"] * 4, ["above", "below", "over"])
    for number, (cases, sides) in enumerate(zip((near, far), expected, strict=True)):
        for place, (speedup, spread) in enumerate(cases):
            bounds = {"speedup_low": speedup - spread, "speedup_high": speedup + spread}
            rows = latency_run(
                draft=f"d{place}", speedup=speedup, speedup_covers=over(15), **bounds
            )
            append_rows(tmp_path / str(number) / "latency.csv", rows)
        page = html_page(build([tmp_path / str(number)]), {})
        assert sorted(re.findall(r'class="whisker (\w+)"', page)) == sides


def by_category(prompts: list[LatencyPromptRow]) -> list[Category]:
    run = Run([LatencyRow(arm="speculative", requests_per_second=1.0, batch_size=8)])
    run.prompt_rows = prompts
    return categories_of(run, attrgetter("category"))


def test_a_category_is_over_all_of_its_tokens() -> None:
    prompts = []
    for index, length in enumerate([4, 256] * 4):
        for arm, step_ms in (("regular", 10), ("speculative", 5)):
            row = LatencyPromptRow(
                prompt_index=index, prompt_place=index, arm=arm, category="all", unit=index, num_tokens=length,
                time_ms=300 + step_ms * (length - 1),
            )  # fmt: skip
            prompts.append(row)
    [category] = by_category(prompts)
    assert category.speedup.estimate == pytest.approx((600 + 2580) / (600 + 1290))
    assert str(category.speedup.covers) == "8 prompts"
    # Two requests of a lap are not independent.
    others = [replace(row, prompt_place=8 + row.place) for row in prompts]
    [in_laps] = by_category([*prompts, *others])
    assert str(in_laps.speedup.covers) == "8 laps"


def test_what_is_typed_next_is_a_load_that_was_left_out(harness: Harness) -> None:
    sweep = ["engine=simulated", "engine.width_ms=3.0", "K=2,4", "batch_size=1,8"]
    page = harness("latency", "-m", *sweep).stdout
    command = "harness latency -m engine=simulated engine.width_ms=3.0 K=2,4 batch_size="
    assert f"2 to 7 not measured\n        {command}3" in page
