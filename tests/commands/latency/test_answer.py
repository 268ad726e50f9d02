"""The printed result of `latency`: short at any width, its doubts, several runs, and the time of an iteration."""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.commands.latency.answer import reasons
from harness.commands.latency.checks import CHECKS, checked, doubts, notes
from harness.commands.latency.costs import StepCosts, main_limit, share_of_iteration
from harness.commands.latency.figures import Category, categories_of
from harness.commands.latency.page import latency_page
from harness.commands.report.command import build
from harness.config.command_line import Words
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.reporting.files import html_page
from harness.results.files import append_rows
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from harness.results.verdict import verdict_of
from pages import short
from report_files import latency_run, over, prompt_rows
from wording import mentions

FIGURES: dict[str, Any] = {
    "num_tokens": 960, "iteration_ms": 630.0, "mean_proposed": 4.0, "acceptance_rate": 0.625,
    "mean_num_draft_tokens": 4.0, "tokens_per_iteration": 3.5,
    "mean_acceptance_length": 3.5, "draft_ms": 80.0, "verify_ms": 330.0, "predicted_speedup": 1.9, "speedup": 1.83,
    "speedup_low": 1.7, "speedup_high": 1.95, "speedup_covers": over(15), "processor_share": 1.0,
    "ignore_eos": True,
}  # fmt: skip


def rows_of_run(**changes: Any) -> list[LatencyRow]:
    regular, speculative = latency_run(**FIGURES | changes)
    costs = dict.fromkeys(
        ("draft_ms", "verify_ms", "mean_acceptance_length", "tokens_per_iteration")
    )
    return [dataclasses.replace(regular, target_step_ms=320.0, **costs), speculative]


def answer(width: int = 80, arguments: str = "latency", **changes: Any) -> str:
    Words.divide(arguments.split()).note()
    return short(latency_page([Run(rows_of_run(**changes))]), width)


@pytest.mark.parametrize("width", [45, 80, 200])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_it_fits_fourteen_lines_and_has_bars(width: int, share: float) -> None:
    text = answer(width, processor_share=share)
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert len(text.splitlines()) <= 14
        assert "first token ms" in text
        regular, speculative = (line for line in text.splitlines() if "█" in line)
        assert regular.count("█") > 1.5 * speculative.count("█") > 0
    # Of figures and bars a narrow terminal keeps the figures.
    assert "ms/token" in text


def test_a_command_is_never_cut_in_two() -> None:
    typed = "latency model=some/long-name prompts=./my-chats.jsonl decoding=greedy decoding.max_new_tokens=256"
    text = answer(arguments=typed)
    assert f"\n           harness {typed} -m K=2,4,8\n" in text
    assert len(text.splitlines()) <= 14


def test_a_run_that_failed_at_once_has_no_answer() -> None:
    assert latency_page([Run(latency_run(status="failed", error="killed"))]) is None


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


STEP_MS = 22.0
FIRST_MS = 300.0
LENGTH = 65
NUM_PROMPTS = 12
K = 4
TOKENS = 3.0


def run_of(iteration_ms: float, **changes: Any) -> Run[LatencyRow]:
    """A run against a server whose prompts take different numbers of iterations."""
    rng = np.random.default_rng(K)
    prompts = []
    for place in range(NUM_PROMPTS):
        num_iterations = round((LENGTH - 1) / (TOKENS * rng.uniform(0.7, 1.3)))
        times = {"speculative": num_iterations * iteration_ms, "regular": (LENGTH - 1) * STEP_MS}
        prompts += [
            LatencyPromptRow(
                prompt_index=place, prompt_place=place, arm=arm, num_tokens=LENGTH, time_ms=FIRST_MS + time,
                time_to_first_token_ms=FIRST_MS, num_iterations=num_iterations if arm == "speculative" else None,
            )
            for arm, time in times.items()
        ]  # fmt: skip
    regular_ms = (FIRST_MS + (LENGTH - 1) * STEP_MS) / LENGTH
    ms = (FIRST_MS + (LENGTH - 1) * iteration_ms / TOKENS) / LENGTH
    figures: dict[str, Any] = {
        "engine": "server", "draft": "head", "draft_method": "eagle3", "num_prompts": NUM_PROMPTS, "mean_proposed": K,
        "num_tokens": NUM_PROMPTS * LENGTH, "time_to_first_token_ms": FIRST_MS, "tokens_per_iteration": TOKENS,
        "requests_per_second": 1.0, "draft_ms": None, "verify_ms": None, "predicted_speedup": None,
        "speedup_covers": over(NUM_PROMPTS), "temperature": 0.0,
    }  # fmt: skip
    both = latency_run(K, regular_ms / ms, **figures | changes)
    times = dict(zip(("regular", "speculative"), (regular_ms, ms), strict=True))
    rows = [row.from_values(row.values() | {"ms_per_token": times[str(row.arm)]}) for row in both]
    run = Run(rows)
    run.prompt_rows = prompts
    return run


SHORT = {"num_tokens": 1, "num_iterations": None, "time_ms": FIRST_MS}


def unfinished(row: LatencyPromptRow) -> LatencyPromptRow | None:
    """Of the first prompt one arm has no answer, and the other a slow one."""
    if row.prompt_index:
        return row
    return replace(row, time_ms=99 * STEP_MS * LENGTH) if row.arm == "regular" else None


@pytest.mark.parametrize(
    "changed",
    [
        lambda row: row,
        # Without the rows of prompts it follows from the means of the run.
        lambda row: None,
        unfinished,
        lambda row: row if row.prompt_index else replace(row, **SHORT),
        lambda row: replace(row, **SHORT),
        # It follows from the mean where a server reports no iterations.
        lambda row: replace(row, num_iterations=None),
    ],
)
def test_the_planted_share_is_found(
    changed: Callable[[LatencyPromptRow], LatencyPromptRow | None],
) -> None:
    run = run_of(33.8)
    run.prompt_rows = [*filter(None, map(changed, run.prompt_rows))]
    assert share_of_iteration(run) == pytest.approx(STEP_MS / 33.8, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        # Rows of a batch wait for the longest.
        {"batch_size": 4, "engine": "local", "requests_per_second": None},
        # Iterations that drafted nothing are not counted.
        {"draft": "ngram-mod", "tokens_per_iteration": None},
        {"tokens_per_iteration": None, "mean_acceptance_length": None},
        # The first of two commands may draft too.
        {"draft": "second command"},
    ],
)
def test_an_iteration_without_a_known_time_has_no_share(changes: dict[str, Any]) -> None:
    assert share_of_iteration(run_of(33.8, **changes)) is None


@pytest.mark.parametrize(("steps", "is_known"), [(0.79, False), (0.81, True)])
def test_an_iteration_takes_a_regular_step(steps: float, is_known: bool) -> None:
    """But for what starts of one program differ by: less is no time of an iteration."""
    assert (share_of_iteration(run_of(steps * STEP_MS)) is not None) == is_known


PAGE = Path(__file__).parents[3] / "docs" / "messages.md"


def explained(heading: str) -> list[str]:
    """The first cells of the table below a heading of the page."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    lines = section.partition("\n## ")[0].splitlines()
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][1:]


def test_the_page_of_messages_explains_each_of_them_and_no_other() -> None:
    left = {heading: explained(heading) for heading in ("Warnings", "Notes")}
    for check in CHECKS:
        if not check.text:
            continue
        fields = [*string.Formatter().parse(check.text)]
        pieces = [text.strip(" .,:;()") for text, *_ in fields]
        rows = left["Notes" if "note" in check.consequence else "Warnings"]
        [row] = [row for row in rows if all(piece in row for piece in pieces)]
        rows.remove(row)
        # If words are filled in, the page may show more of their form than "…".
        if all(form for _, name, form, _ in fields if name):
            assert row == "".join(text + "…" * (name is not None) for text, name, *_ in fields)
    assert left == {"Warnings": [], "Notes": []}


# By figures of the regular and of the speculative arm: what is said, `` for no sentence at all.
Changes = dict[str, Any]
SERVED = {"engine": "server", "url": "http://gpu:1/v1", "regular_url": "http://gpu:2/v1"}
CLIENTS = (
    "Whether other clients used the servers during the run is unknown: no counters of the server show it (llama.cpp:"
    " `--metrics`)."
)
RUNNING = f"{CLIENTS} The servers were already running: their share of CPU time is unknown."
BUSY = {"processor_share": 0.4, "load": 9.0, "num_cores": 4}
FAILED = {"status": "failed", "ms_per_token": 100.0, "num_prompts": 15}
SLOW = {"time_to_first_token_ms": 170.0, "server_time_to_first_token_ms": 100.0}
READ = {"num_prompts": 15, "num_prompt_tokens": 1000}
AFTER = {"share_after_end": 0.06, "ignore_eos": True}
DRIFT = {"drift": 0.8, "drifted": False}
BY_ANSWER = {"ms_per_token_per_answer": 60.0, "shortest_answer": 3, "longest_answer": 64}
LOW = {"requests_per_second": 1.0, "conditional_acceptance_rate": 0.2}
SAID: list[tuple[Changes, Changes, str]] = [
    ({}, BUSY, "got 40.0 % of the CPU time it wanted (load 9.0 on 4 cores, its own included)."),
    ({}, BUSY | {"processor_share": 0.9}, ""),
    ({}, BUSY | {"speedup": None}, "Processes waited for a core: this run got 40.0 %"),
    (FAILED, FAILED | {"num_failed": 2}, "15 regular and 13 speculative prompts."),
    ({}, FAILED | {"status": "no_verdict"}, ""),
    ({}, {"engine": "simulated"}, "engine=simulated: costs and acceptance are made up"),
    ({"num_failed": 1}, {"num_failed": 2}, "failed: 1 of 15 regular and 2 of 15 speculative."),
    ({"num_empty": 2}, {"num_empty": 1}, "left out: 2 of 15 regular and 1 of 15 speculative."),
    ({}, {"synthetic_acceptance": 0.8}, "=0.8: draft tokens were accepted at random with this probability."),
    ({}, {"lossy": True, "lenience": 0.5}, "lenience 0.5: the speculative output no longer follows"),
    ({}, {"runner": "eager", "draft_runner": "compiled"}, "which inflates the speed-up."),
    ({}, {"runner": "static, no graphs", "draft_runner": "compiled, no graphs"}, "which inflates the speed-up."),
    ({}, {"runner": "eager", "draft_runner": "static"}, ""),
    ({}, SERVED | {"lossy": True}, "engine.lossy=true: the speculative output no longer follows"),
    ({}, SERVED | {"url": "http://127.0.0.1:1/v1", "regular_url": "http://localhost:2/v1"}, RUNNING),
    ({}, SERVED, "servers at gpu:2 and gpu:1 may be different machines or devices: a slower one would"),
    ({}, SERVED | {"url": "http://gpu:2/v1/b"}, RUNNING),
    ({}, SERVED | {"regular_url": None}, RUNNING),
    ({}, SERVED | {"speedup": None}, RUNNING),
    ({}, SERVED | {"url": "http://gpu:2/v1"}, "Both URLs or both commands are the same"),
    ({}, {"server_command": ["vllm A", "vllm A"]}, "Both URLs or both commands are the same"),
    ({}, {"other_gpu_processes": 1}, "busy: 1 other process computed on them."),
    ({}, {"gpu_throttled": "heat", "lowest_gpu_clock_mhz": 900}, "lowered to 900 MHz (heat)."),
    ({}, {"num_throttled_units": 1}, "The GPUs were busy: clocks were lowered."),
    ({}, {"gpu_throttled": "heat", "other_gpu_processes": 2}, "computed on them and clocks were"),
    ({}, DRIFT | {"drifted": True}, "of the second half is 0.80 times"),
    ({}, DRIFT, ""),
    ({"foreign_tokens": 5}, {}, "Other clients used the servers: at least 5 tokens on the regular server."),
    ({}, SLOW, "170 ms in the speculative arm, 100 ms by the server's clock: this"),
    ({}, SLOW | {"time_to_first_token_ms": 160.0}, ""),
    ({}, SLOW | {"foreign_tokens": 1, "speedup": None}, "Other clients used the servers: at least 1 token on"),
    ({"cached_tokens": 10, "read_prompt_tokens": 1000} | READ, {}, "from a cache: 1 % in the regular arm."),
    ({}, SLOW | {"server_time_to_first_token_ms": None}, ""),
    ({"cached_tokens": 20} | READ, {"cached_tokens": 0}, ""),
    ({"cached_tokens": 520} | READ, {"cached_tokens": 500}, ""),
    (READ | {"read_prompt_tokens": 1035}, {}, ""),
    (READ | {"read_prompt_tokens": 1036}, {}, "1036 prompt tokens in the regular arm, where 1000"),
    ({}, READ | {"read_prompt_tokens": 964}, "964 prompt tokens in the speculative arm"),
    (READ, READ, ""),
    ({}, {"read_prompt_tokens": 16}, "16 prompt tokens in the speculative arm, where 0 are"),
    ({}, {"read_prompt_tokens": 15}, ""),
    ({}, {"interleaved": False}, "The arms did not alternate"),
    ({}, {"interleaved": False, "num_prompts": 1}, ""),
    ({}, AFTER, "6 % of the tokens come after the natural end of their text; decoding"),
    ({}, AFTER | {"share_after_end": 0.05}, ""),
    ({}, AFTER | {"ignore_eos": False}, ""),
    ({}, AFTER | {"share_after_end": 0.994}, "99 %"),
    ({}, {"draft_remembers": True, "num_different_prompts": 3}, "3 prompts were sent in 15 requests"),
    ({"ms_per_token_per_answer": 72.0}, BY_ANSWER, "2.00×, with equal weights for all answers 1.20×"),
    ({"ms_per_token_per_answer": 108.0}, BY_ANSWER, ""),
    ({"ms_per_token_per_answer": 156.0}, BY_ANSWER, "with equal weights for all answers 2.60×"),
    ({"ms_per_token_per_answer": 156.0}, BY_ANSWER | {"speedup": None}, ""),
    ({}, {"num_skipped": 3}, "3 prompts were left out (too long for the context)."),
    ({}, {"salted": False}, "takes no cache salt"),
    ({}, {"salted": True}, ""),
    ({"host_share": 0.11}, {"host_share": 0.2}, "11 % of the regular arm's time and 20 % of the speculative arm's"),
    ({"host_share": 0.1}, {}, ""),
    ({}, LOW, "Acceptance is low: 20.0 % of the tested draft tokens."),
    ({}, LOW | {"conditional_acceptance_rate": 0.21}, ""),
    ({}, LOW | {"requests_per_second": None}, ""),
    ({"processor_share": 0.95} | READ, BUSY | {"processor_share": 0.89}, "got 89.0 % of the CPU time"),
    ({"unseen_tokens": 4, "server_tokens": 5, "num_tokens": 9}, {}, "only 5 of 9 tokens of the regular arm: they"),
    ({}, {"impossible_counts": "9 accepted of 8 (draft_n 8)"}, "(draft_n 8) in the speculative arm. No"),
    ({"held_back": True, "tokens_per_arrival": 9.04}, {}, "Tokens arrive 9.0 at a time in the regular arm:"),
    ({}, {"held_back": True, "tokens_per_arrival": 30.0}, "arrive 30.0 at a time in the speculative arm: the cost"),
]  # fmt: skip


@pytest.mark.parametrize(("regular", "speculative", "said"), SAID)
def test_what_is_said_of_a_run(regular: Changes, speculative: Changes, said: str) -> None:
    plain, drafted = latency_run()
    rows = [
        plain.from_values(plain.values() | regular),
        drafted.from_values(drafted.values() | speculative),
    ]
    text = " ".join([*doubts(Run(rows)), *notes(Run(rows))])
    assert said in text
    assert text == said or said not in ("", RUNNING)


def test_a_run_that_is_not_compared_has_no_doubt_about_the_arms() -> None:
    found = {"interleaved": False} | DRIFT
    found |= AFTER | READ | {"read_prompt_tokens": 1, "cached_tokens": 900, "drifted": True}
    regular, row = latency_run(**found, url="http://a/v1", regular_url="http://a/v1")
    [clients] = doubts(Run([regular, replace(row, speedup=None)]))
    assert mentions(clients, "Whether other clients", "is unknown: both arms asked one server.")


@pytest.mark.parametrize(
    ("counts", "is_said"),
    [
        ({"num_different_prompts": 2}, False),
        ({"num_different_prompts": 1}, True),
        ({"num_different_prompts": 3, "num_prompts_in_set": 1}, True),
    ],
)
def test_a_single_prompt_is_said(counts: dict[str, int], is_said: bool) -> None:
    found = doubts(Run(latency_run(**counts)))
    assert ["only one prompt" in doubt for doubt in found] == [True] * is_said


def test_a_check_whose_figures_are_unknown_has_no_tick() -> None:
    known = {
        "cached_tokens": 0,
        "foreign_tokens": 0,
        "drafted": True,
        "identical_prompts": 15,
        "drifted": False,
        "processor_share": 1.0,
        "other_gpu_processes": 0,
    }
    rows = latency_run(**known, lowest_gpu_clock_mhz=1400, num_throttled_units=0, num_tokens=960)
    run = Run([replace(rows[0], drafted=False), rows[1]])
    (held,) = checked(run)
    assert held.split(" · ") == [
        "got its CPU time", "GPUs otherwise idle", "no significant drift", "equal token counts", "equal texts",
        "caches cold", "no other client", "regular arm drafted nothing",
    ]  # fmt: skip
    for index, name in itertools.product((0, 1), [*known, "num_tokens"]):
        arms = list(run.rows)
        arms[index] = replace(arms[index], **{name: None})
        (found,) = checked(Run(arms))
        of_both = ("cached_tokens", "foreign_tokens", "drafted", "num_tokens")
        is_needed = index == 1 or name in of_both
        assert (found == held) != is_needed, name


def test_equal_work_of_several_runs_is_that_of_each() -> None:
    """Means over runs are equal here, and no run had equal work."""

    def run(
        *num_tokens: int, parts: Sequence[Run[LatencyRow]] = (), **changes: Any
    ) -> Run[LatencyRow]:
        rows = [
            replace(row, num_tokens=number, **changes)
            for row, number in zip(latency_run(), num_tokens, strict=True)
        ]
        return Run(rows, parts=parts)

    unequal = [run(960, 880), run(880, 960)]
    assert checked(run(920, 920, parts=unequal, repeat="all")) == []
    assert checked(run(920, 920, repeat="all")) == [], "its runs were not read"
    equal = [run(960, 960), run(880, 880)]
    assert checked(run(920, 920, parts=equal, repeat="all")) == ["equal token counts"]


def test_two_servers_that_draft_have_a_reason_each() -> None:
    regular, row = latency_run(
        draft=SECOND_COMMAND, requests_per_second=1.0, mean_num_draft_tokens=3.9, verify_ms=None
    )
    first = replace(regular, acceptance_rate=0.58, tokens_per_iteration=3.2)
    second = replace(row, acceptance_rate=0.9, tokens_per_iteration=3.1, mean_num_draft_tokens=2.3)
    said = reasons(Run([first, second]), verdict_of(second))
    assert said == [
        "first: 3.9 drafted per iteration, 58 % accepted: 3.2 tokens per iteration",
        "second: 2.3 drafted per iteration, 90 % accepted: 3.1 tokens per iteration",
    ]


def test_the_first_error_is_named() -> None:
    run = Run(latency_run(num_failed=1))
    run.prompt_rows = [
        replace(row, error=f"{row.arm} broke")
        for row in prompt_rows(run.rows, [("a", 50.0)])
        if row.arm == "speculative"
    ]
    assert mentions(doubts(run)[0], "1 of 15 regular and", "(the first: speculative broke)")
