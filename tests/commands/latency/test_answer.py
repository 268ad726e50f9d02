"""The printed result of one run of `latency`: short at any width, and in full."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from harness.commands.latency.answer import checks_that_held
from harness.commands.latency.costs import StepCosts, held_back, main_limit
from harness.commands.latency.page import latency_page
from harness.commands.latency.table_row import table_rows
from harness.config.command_line import Words
from harness.measuring.rows import LatencyRow
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from pages import full, short
from report_files import latency_run, over, prompt_rows
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
        ({"engine": "local", "server": None}, 1, "harness 0.1.0, engine=local"),
        ({"model": "a|b"}, 0, r"a\|b"),
        ({"server_command": None}, -1, "–"),
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
