"""The table of doubts: each is said on its side of its bound, and explained on the page of messages."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.commands.latency.doubts import DOUBTS, doubts, notes
from harness.results.runs import Run
from report_files import latency_run, prompt_rows
from wording import mentions

PAGE = Path(__file__).parents[3] / "docs" / "messages.md"


def explained(heading: str) -> list[str]:
    """The first cells of the table below a heading of the page."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    lines = section.partition("\n## ")[0].splitlines()
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][1:]


def test_the_page_of_messages_explains_each_of_them_and_no_other() -> None:
    left = {heading: explained(heading) for heading in ("Warnings", "Notes")}
    for doubt in DOUBTS:
        fields = string.Formatter().parse(doubt.text)
        pieces = [text.strip(" .,:;()") for text, *_ in fields]
        rows = left["Notes" if "note" in doubt.rank else "Warnings"]
        [row] = [row for row in rows if all(piece in row for piece in pieces)]
        rows.remove(row)
    assert left == {"Warnings": [], "Notes": []}


# By figures of the regular and of the speculative arm: what is said, `` for no sentence at all.
Changes = dict[str, Any]
SERVED = {"engine": "server", "url": "http://gpu:1/v1", "regular_url": "http://gpu:2/v1"}
RUNNING = "The servers ran already: their share of CPU time is unknown."
BUSY = {"processor_share": 0.4, "load": 9.0, "num_cores": 4}
FAILED = {"status": "failed", "ms_per_token": 100.0, "num_prompts": 15}
SLOW = {"time_to_first_token_ms": 170.0, "server_time_to_first_token_ms": 100.0}
READ = {"num_prompts": 15, "num_prompt_tokens": 1000}
AFTER = {"share_after_end": 0.06, "ignore_eos": True}
DRIFT = {"drift": 0.8, "drifted": False}
BY_ANSWER = {"ms_per_token_per_answer": 60.0, "shortest_answer": 3, "longest_answer": 30}
LOW = {"requests_per_second": 1.0, "conditional_acceptance_rate": 0.2}
SAID: list[tuple[Changes, Changes, str]] = [
    (BUSY, {}, "this run got 40 % of the CPU time it wanted (load"),
    ({}, BUSY, "got 40 % of the CPU time it wanted (load 9.0 on 4 cores)."),
    ({}, BUSY | {"processor_share": 0.9}, ""),
    ({}, BUSY | {"speedup": None}, "The machine was not quiet: this run got 40 %"),
    (FAILED, FAILED | {"num_failed": 2}, "15 regular and 13 speculative prompts."),
    ({}, FAILED | {"status": "no_verdict"}, ""),
    ({}, {"engine": "simulated"}, "engine=simulated: costs and acceptance are planted"),
    ({"num_failed": 1}, {"num_failed": 2}, "failed: 1 of 15 regular and 2 of 15 speculative."),
    ({"num_empty": 2}, {"num_empty": 1}, "left out: 2 of 15 regular and 1 of 15 speculative."),
    ({}, {"synthetic_acceptance": 0.8}, "=0.8: draft tokens were accepted at random, this often."),
    ({}, {"lossy": True, "lenience": 0.5}, "lenience 0.5: the speculative output no longer follows"),
    ({}, {"runner": "eager", "draft_runner": "compiled"}, "which inflates the speed-up."),
    ({}, {"runner": "eager", "draft_runner": "static"}, ""),
    ({}, SERVED | {"lossy": True}, "engine.lossy=true: the speculative output no longer follows"),
    ({}, SERVED | {"url": "http://127.0.0.1:1/v1", "regular_url": "http://localhost:2/v1"}, RUNNING),
    ({}, SERVED, "servers at gpu:2 and gpu:1 may be different machines or devices: a slower one would"),
    ({}, SERVED | {"url": "http://gpu:2/v1/b"}, RUNNING),
    ({}, SERVED | {"regular_url": None}, RUNNING),
    ({}, SERVED | {"speedup": None}, RUNNING),
    ({}, SERVED | {"url": "http://gpu:2/v1"}, "Both URLs are the same server"),
    ({}, {"server_command": ["vllm A", "vllm A"]}, "Both commands are the same"),
    ({}, {"other_gpu_processes": 1}, "not quiet: 1 other process computed on them."),
    ({}, {"gpu_throttled": "heat", "lowest_gpu_clock_mhz": 900}, "lowered to 900 MHz (heat)."),
    ({"num_throttled_units": 1}, {}, "The GPUs were not quiet: clocks were lowered."),
    ({}, {"gpu_throttled": "heat", "other_gpu_processes": 2}, "computed on them and clocks were"),
    ({}, DRIFT | {"drifted": True}, "of the second half is 0.80 times"),
    ({}, DRIFT, ""),
    ({}, {"rare_units": "2 of 8 prompts"}, "2 of 8 prompts: they cause most"),
    ({"foreign_tokens": 5}, {}, "The server processed 5 tokens during the regular arm for other clients."),
    ({}, SLOW, "170 ms in the speculative arm, 100 ms by the server's clock: this"),
    ({}, SLOW | {"time_to_first_token_ms": 160.0}, ""),
    ({}, SLOW | {"foreign_tokens": 1, "speedup": None}, "The server processed 1 token during"),
    ({"share_after_last_token": 0.051}, {}, "Time after the last token: 5 % in the regular arm."),
    ({}, {"share_after_last_token": 0.05}, ""),
    ({"cached_tokens": 10, "read_prompt_tokens": 1000} | READ, {}, "from a cache: 1 % in the regular arm."),
    ({}, SLOW | {"server_time_to_first_token_ms": None}, ""),
    ({"cached_tokens": 20} | READ, {"cached_tokens": 0}, ""),
    ({"cached_tokens": 520} | READ, {"cached_tokens": 500}, ""),
    ({"cached_tokens": 21} | READ, {"cached_tokens": 0}, "1000 prompt tokens from a cache: regular 21"),
    ({"cached_tokens": 21} | READ, {}, "regular 21, speculative unknown."),
    (READ | {"read_prompt_tokens": 1035}, {}, ""),
    (READ | {"read_prompt_tokens": 1036}, {}, "1036 prompt tokens in the regular arm, where 1000"),
    ({}, READ | {"read_prompt_tokens": 964}, "964 prompt tokens in the speculative arm"),
    (READ, READ, ""),
    ({}, {"read_prompt_tokens": 16}, "16 prompt tokens in the speculative arm, where 0 are"),
    ({}, {"read_prompt_tokens": 15}, ""),
    ({}, {"interleaved": False}, "The arms did not take turns"),
    ({}, AFTER, "after the end of their texts: 6 %; decoding.ignore_eos=false stops there."),
    ({}, AFTER | {"share_after_end": 0.05}, ""),
    ({}, AFTER | {"ignore_eos": False}, ""),
    ({}, AFTER | {"share_after_end": 0.994}, "99 %"),
    ({}, {"draft_remembers": True, "num_different_prompts": 3}, "3 prompts were asked 15 times"),
    ({"ms_per_token_per_answer": 72.0}, BY_ANSWER, "tokens is 2.00×, the mean over answers 1.20×"),
    ({"ms_per_token_per_answer": 108.0}, BY_ANSWER, ""),
    ({"ms_per_token_per_answer": 156.0}, BY_ANSWER, "the mean over answers 2.60×"),
    ({"ms_per_token_per_answer": 156.0}, BY_ANSWER | {"speedup": None}, ""),
    ({}, {"num_skipped": 3}, "3 prompts were left out (too long for the context)."),
    ({}, {"salted": False}, "takes no cache salt"),
    ({}, {"salted": True}, ""),
    ({"host_share": 0.11}, {"host_share": 0.2}, "11 % of the regular arm's time and 20 % of the speculative arm's"),
    ({"host_share": 0.1}, {}, ""),
    ({}, LOW, "Acceptance is low: 20.0 % of the tested draft tokens."),
    ({}, LOW | {"conditional_acceptance_rate": 0.21}, ""),
    ({}, LOW | {"requests_per_second": None}, ""),
    ({"processor_share": 0.95} | READ, BUSY | {"processor_share": 0.89}, "got 89 % of the CPU time"),
    ({"unseen_tokens": 4, "server_tokens": 5, "num_tokens": 9}, {}, "only 5 of 9 tokens of the regular arm,"),
    ({}, {"impossible_counts": "9 accepted of 8 (draft_n 8)"}, "(draft_n 8) in the speculative arm. No"),
    ({"held_back": True, "tokens_per_arrival": 9.04}, {}, "Tokens arrive 9.0 at a time in the regular arm:"),
    ({}, {"held_back": True, "tokens_per_arrival": 30.0}, "arrive 30.0 at a time in the speculative arm: the time"),
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
    found = {"interleaved": False, "rare_units": "2 of 8"} | DRIFT
    found |= AFTER | READ | {"read_prompt_tokens": 1, "cached_tokens": 900, "drifted": True}
    regular, row = latency_run(**found, url="http://a/v1", regular_url="http://a/v1")
    assert doubts(Run([regular, replace(row, speedup=None)])) == []


@pytest.mark.parametrize(
    ("texts", "num_different", "said"),
    [
        ("ab", None, ""),
        ("aabb", 2, ""),
        ("aab", 2, "2 of 3 prompts"),
        # Conversations that end with the same message, of which two are the same.
        ("aaaaa", None, ""),
        ("aaaaa", 4, ""),
    ],
)
def test_repeated_prompts_are_said(texts: str, num_different: int | None, said: str) -> None:
    run = Run(latency_run(num_different_prompts=num_different))
    run.prompt_rows = [
        replace(row, prompt=texts[row.prompt_index or 0])
        for row in prompt_rows(run.rows, [("a", 50.0)] * len(texts))
    ]
    assert said in " ".join(found := doubts(run))
    assert bool(found) == bool(said)


def test_the_first_error_is_named() -> None:
    run = Run(latency_run(num_failed=1))
    run.prompt_rows = [
        replace(row, error=f"{row.arm} broke")
        for row in prompt_rows(run.rows, [("a", 50.0)])
        if row.arm == "speculative"
    ]
    assert mentions(doubts(run)[0], "1 of 15 regular and", "(speculative broke)")
