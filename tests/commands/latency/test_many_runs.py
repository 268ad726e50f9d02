"""What is said of several runs and of parts of their prompts: rivals, loads, categories, from planted rows."""

from __future__ import annotations

import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.commands.latency.figures import Category, categories_of, pairs_table
from harness.commands.latency.page import latency_page
from harness.commands.latency.ranking import ranked_runs
from harness.commands.report.command import build
from harness.measuring.rows import LatencyRow
from harness.reporting.files import html_page
from harness.results.files import append_rows
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run, group
from in_process import Harness
from pages import findings
from report_files import all_tables, latency_run, over, prompt_rows, write


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


def test_a_busy_machine_orders_by_intervals_alone(tmp_path: Path) -> None:
    """What differs from run to run there is in no comparison of prompts."""
    assert "Gains significantly less" in rivals_of(tmp_path / "quiet", factor=1.06)
    busy = rivals_of(tmp_path / "busy", factor=1.06, processor_share=0.5)
    assert "Cannot be told apart from it: 13B with lookup, K=4:" in busy
    far = rivals_of(tmp_path / "far", factor=1.5, processor_share=0.5)
    assert "Gains significantly less: 13B with lookup, K=4:" in far


def headlines_of(directory: Path, *speedups: float, **changes: Any) -> str:
    """The headlines of pairs with these speed-ups, all ± 0.1, without files of prompts."""
    for number, speedup in enumerate(speedups):
        changes = {"speedup_covers": over(15)} | changes
        run = latency_run(draft=f"draft{number}", speedup=speedup, **changes)
        append_rows(directory / "latency.csv", run)
    return " ".join(line.text for line in findings(build([directory])))


def test_the_fastest_of_several_has_an_interval_that_holds_for_all(tmp_path: Path) -> None:
    """By its own interval, 1.90 to 2.10, it is faster than one of 1.72 to 1.92 would be at most."""
    text = headlines_of(tmp_path, 2.0, 1.82, 1.2)
    assert "draft0" in text.partition("2.00×")[0]
    low, high = map(float, re.findall(r"interval (\d\.\d+) to (\d\.\d+)", text)[0])
    assert low < 1.89
    assert high > 2.11
    assert "for 3 pairs at once" in text
    assert re.search(r"Cannot be told apart from it: [^;]*draft1[^;]*?\.", text)
    table = all_tables(build([tmp_path]))[0]
    assert "Intervals of speed-ups hold for all 3 at once." in table.notes


def test_a_sweep_without_any_interval_names_the_prompts_that_give_one() -> None:
    """Eight laps of the four in flight, not eight prompts."""
    unknown = {"speedup_low": None, "speedup_high": None, "speedup_covers": over(4, "lap")}
    runs = [Run(latency_run(k, batch_size=4, num_prompts=16, **unknown)) for k in (2, 6)]
    page = latency_page(runs)
    assert [line.text for line in page.finding] == ["No run has a verdict."]
    assert [(step.text, step.changes) for step in page.next] == [("an interval", "num_prompts=32")]


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


@pytest.mark.parametrize(
    ("other", "num_rivals"),
    [({"model": "30B"}, 0), ({"server_command": ["vllm B", "vllm A -d"]}, 0), ({"draft": "1B"}, 1)],
)
def test_another_target_is_no_rival(tmp_path: Path, other: Any, num_rivals: int) -> None:
    """The fastest speed-up of a slow target says nothing about another target's drafts."""
    commands = {"server_command": ["vllm A", "vllm A -d"]}
    runs = [latency_run(speedup=3.0, **commands), latency_run(speedup=1.5, **commands | other)]
    text = " ".join(line.text for line in findings(build([write(tmp_path / "latency.csv", *runs)])))
    assert text.count("Gains significantly less") == num_rivals


def test_a_table_over_loads_is_in_the_order_of_the_loads() -> None:
    """By speed-up they were 1, 64, 4, 16; another pair stays apart."""
    speedups = {16: 1.1, 1: 2.5, 64: 1.4, 4: 1.2}
    rows = [
        row
        for load, speedup in speedups.items()
        for draft, factor in (("7B", 1.0), ("3B", 1.1))
        for row in latency_run(speedup=speedup * factor, batch_size=load, draft=draft)
    ]
    pairs = ranked_runs(group(rows))
    assert [pair.load for pair in pairs] == [1, 4, 16, 64] * 2
    assert [pair.row.draft for pair in pairs] == ["3B"] * 4 + ["7B"] * 4
    assert len(pairs_table(pairs).rows) == 8


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
