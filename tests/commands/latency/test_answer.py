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

from harness.commands.latency.answer import checks_that_held
from harness.commands.latency.costs import StepCosts, held_back, main_limit
from harness.commands.latency.figures import Category, categories_of, pairs_table
from harness.commands.latency.page import latency_page
from harness.commands.latency.ranking import ranked_runs
from harness.commands.latency.table_row import table_rows
from harness.commands.report.command import build
from harness.config.command_line import Words
from harness.measuring.rows import LatencyRow
from harness.reporting.files import html_page
from harness.results.files import append_rows
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run, runs_of
from in_process import Harness
from pages import findings, full, short
from report_files import all_tables, latency_run, over, prompt_rows, write
from wording import mentions

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


CHECKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "regular arm drafted nothing": ({"drafted": False}, {"held_back": True}),
    "machine quiet": ({"drifted": False}, {"url": "http://127.0.0.1:8000/v1"}),
    "no other client": ({"foreign_tokens": 0}, {"foreign_tokens": None}),
}


@pytest.mark.parametrize("check", CHECKS)
def test_only_a_check_that_could_fail_has_held(check: str) -> None:
    held, not_held = CHECKS[check]
    for figures, is_held in ((held, True), (held | not_held, False)):
        regular, row = latency_run(**FIGURES)
        rows = [
            dataclasses.replace(regular, **figures),
            dataclasses.replace(row, **figures | {"drafted": True}),
        ]
        assert (check in " ".join(checks_that_held(rows))) == is_held


def test_a_command_is_never_cut_in_two() -> None:
    typed = "latency model=some/long-name prompts=./my-chats.jsonl decoding=greedy decoding.max_new_tokens=256"
    text = answer(arguments=typed)
    assert f"\n           harness {typed} -m K=2,4,8\n" in text
    assert len(text.splitlines()) <= 14


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("latency K=4", "harness latency -m K=2,4,8"),
        ("latency -m K=2,4", "harness latency -m K=2,4,8"),
        ("latency -m K=2,4 T=0,1", "harness latency T=0,1 -m K=2,4,8"),
        (
            "latency T=0 decoding.num_draft_tokens=4 details=true seed=1",
            "harness latency T=0 seed=1 -m K=2,4,8",
        ),
        ("latency gamma=4 tokens=8", "harness latency tokens=8 -m K=2,4,8"),
        (
            "latency verbose=true -- llama-server -K 4",
            "harness latency -m K=2,4,8 -- llama-server -K 4",
        ),
    ],
)
def test_what_is_typed_next_replaces_a_setting_however_it_was_typed(
    typed: str, expected: str
) -> None:
    assert f" {expected}\n" in f"{answer(arguments=typed)}\n"


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


def printed(prompts: list[LatencyPromptRow] | None = None, **changes: Any) -> str:
    run = Run(rows_of_run(**changes))
    run.prompt_rows = prompts or []
    return full(latency_page([run]))


def test_decoding_alone_stands_beside_the_speedup() -> None:
    ends = {"decode_speedup_low": 2.4, "decode_speedup_high": 2.6}
    assert "2.51× (2.40 to 2.60)" in printed(decode_speedup=2.51, **ends)


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


def test_tokens_per_iteration_are_those_of_all_iterations() -> None:
    """As `lookup` has them: of 10 iterations 2 proposed something, and one of these had a token accepted."""
    prompts = [
        dataclasses.replace(row, num_iterations=10, num_tokens=12)
        if row.arm == "speculative"
        else row
        for row in prompt_rows(rows_of_run(run="1"), [("story", 40.0), ("sum", 80.0)])
    ]
    text = printed(prompts, tokens_per_iteration=1.1, mean_acceptance_length=1.5)
    lines = [line.replace("│", " ").split() for line in text.splitlines()]
    assert ["story", "1", "12.5", "%", "1.10"] in lines
    assert any({"1.10", "1.50"} < set(line) for line in lines)
    assert "story" not in printed(prompts, batch_size=4), "a batch has one time"


def test_greedy_texts_are_compared() -> None:
    assert "15 of 15" in printed(identical_prompts=15, differing_prompts=0)
    found: dict[str, Any] = {"identical_prompts": 1, "differing_prompts": 2}
    text = printed(**found, margin_over_rounding=0.3)
    assert "1 of 3" in text
    assert "within rounding (0.3×)" in text
    assert "dentical" not in printed()


def test_the_roof_is_not_clamped() -> None:
    roof = {"step_bytes": 65_000_000_000, "floor_ms": 40.0}
    text = " ".join(printed(**roof).split())
    assert mentions(text, "target reads", "65.0 GB", "40.00 ms", "1625 GB/s")
    assert mentions(text, "320.00 ms", "12 %")
    assert "draft reads" not in text
    text = " ".join(printed(**roof, draft_step_bytes=14_000_000, draft_floor_ms=140.0).split())
    assert "14.0 MB per step" in text
    assert mentions(text, "70.00 ms", "200 %", "caches")
    assert "reads" not in printed(**roof | {"floor_ms": None})


LLAMA = "llama-server -m Qwen3.gguf --host 127.0.0.1 --port '{port}' --metrics"
DRAFTS = (
    "llama-server -m Qwen3.gguf --spec-type draft-mtp --host 127.0.0.1 --port '{port}' --metrics"
)
LLAMA_CPP: dict[str, Any] = {
    "engine": "server", "server": "llama.cpp b10434", "server_command": [LLAMA, DRAFTS], "model": "Qwen3.gguf",
    "draft": "draft-mtp", "draft_method": "draft-mtp", "tokens_per_iteration": 2.5, "url": None,
}  # fmt: skip


def cells(run: list[LatencyRow]) -> list[str]:
    """The cells of a run's row."""
    headings, separator, line = table_rows([Run(run)])
    assert re.fullmatch(r"\|( --- \|)+", separator)
    texts = [re.split(r"(?<!\\)\|", each)[1:-1] for each in (headings, line)]
    assert len(texts[0]) == len(texts[1]) == separator.count("---")
    return [text.strip() for text in texts[1]]


def test_a_row_says_what_was_measured() -> None:
    run = latency_run(2, 1.5, **LLAMA_CPP)
    assert cells(run) == [
        "Qwen3.gguf",
        "llama.cpp b10434",
        "draft-mtp",
        "2",
        "NVIDIA A100",
        "float16",
        "15 (english)",
        "64",
        "0.5",
        "1.50× (1.40 to 1.60)",
        "2.50",
        "0.1.0 aaaaaaaaa",
        run[0].run,
        "`llama-server -m Qwen3.gguf --spec-type draft-mtp --metrics`",
    ]


@pytest.mark.parametrize(
    ("changes", "column", "text"),
    [
        ({"speedup_covers": over(15)}, 9, "1.50× (1.40 to 1.60) over 15 prompts"),
        ({"speedup_low": None, "speedup_high": None}, 9, "1.50× (no interval)"),
        ({"status": "no_verdict", "error": "x", "speedup": None}, 9, "no verdict"),
        ({"processor_share": 0.5}, 9, "1.50× (1.40 to 1.60), not quiet"),
        ({"draft": "org/head", "draft_method": "eagle3"}, 2, "org/head (eagle3)"),
        ({"draft": "server", "draft_method": None}, 2, "the server's own"),
        ({"engine": "local", "server": None}, 1, "engine=local"),
        ({"model": "a|b"}, 0, r"a\|b"),
        ({"server_command": None}, -1, "–"),
        ({"commit": None}, 11, "0.1.0"),
        ({"status": "interrupted"}, 9, "1.50× (1.40 to 1.60), interrupted"),
        ({"dtype": None, "temperature": None}, 5, "–"),
    ],
)
def test_what_a_run_lacks(changes: dict[str, Any], column: int, text: str) -> None:
    regular, speculative = latency_run(2, 1.5, **LLAMA_CPP)
    assert cells([regular, speculative.from_values(speculative.values() | changes)])[column] == text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("vllm serve A --x '{\"a|b\": 1}' --host 127.0.0.1 --port '{port}'",
         "`vllm serve A --x '{\"a\\|b\": 1}'`"),
        ("docker run -p '{port}:8000' vllm/vllm-openai", "`docker run -p '{port}:8000' vllm/vllm-openai`"),
        ("vllm serve '`A`'", "`` vllm serve '`A`' ``"),
        ("vllm serve 'a; b'", "`vllm serve 'a; b'`"),
    ],
)  # fmt: skip
def test_a_command_lacks_our_port(command: str, shown: str) -> None:
    assert cells(latency_run(**LLAMA_CPP | {"server_command": [command]}))[-1] == shown


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
    pairs = ranked_runs(runs_of(rows))
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
