"""Prompts that are asked again: their order, their units, their salt, and what is said about them."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest

from echo_server import EchoServer, serving
from harness.measuring.asking import Part, batches_to_ask, laps_to_ask
from harness.measuring.prompts.sets import Occurrence, Prompt, PromptSet
from in_process import QUICKEST_PAIR, Harness, only, results

QUICK = ["latency", *QUICKEST_PAIR, "decoding=greedy", "decoding.max_new_tokens=4"]


def share_prompts(parts: list[Part]) -> bool:
    units = {(place, part.unit) for part in parts for place, _ in part.prompts}
    return len(units) > len({place for place, _ in units})


@pytest.mark.parametrize(
    "parts",
    [
        batches_to_ask(10, 34, 4, 0),
        laps_to_ask(10, 34, lambda number: number, 0),
        laps_to_ask(80, 200, lambda number: number // 8, 0),
        laps_to_ask(10, 34, lambda number: 1, 0),
    ],
)
def test_every_prompt_is_asked_as_often_as_the_others(parts: list) -> None:
    asked = [prompt for part in parts for prompt in part.prompts]
    assert len(asked) == len(set(asked)) in (34, 200)
    counts = Counter(place for place, _ in asked)
    most = max(counts.values())
    # Batches stay whole: in the last round some come and some do not.
    assert set(counts.values()) <= {most, most - 1}
    assert sorted({repeat for _, repeat in asked}) == list(range(most))


def test_a_batch_that_comes_again_is_the_same_unit_in_another_order() -> None:
    parts = batches_to_ask(32, 96, 4, 0)
    assert not share_prompts(parts)
    orders = [[part.unit for part in parts[first : first + 8]] for first in (0, 8, 16)]
    assert orders[0] == list(range(8))
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(8)) for order in orders)
    for part in parts:
        places = [place for place, _ in part.prompts]
        assert places == list(range(4 * part.unit, 4 * part.unit + 4))
    assert batches_to_ask(32, 96, 4, 0) == parts != batches_to_ask(32, 96, 4, 1)


def test_batches_share_prompts_where_too_few_would_have_an_interval() -> None:
    """Of 40 prompts in batches of 16 there would be three units, however often they are asked."""
    parts = batches_to_ask(40, 128, 16, 0)
    assert [part.unit for part in parts] == list(range(8))
    assert {len(part.prompts) for part in parts} == {16}
    assert share_prompts(parts)
    assert not share_prompts(batches_to_ask(40, 128, 4, 0))
    assert not share_prompts(batches_to_ask(40, 64, 16, 0))
    # No batch has more rows than were asked for.
    assert max(len(part.prompts) for part in batches_to_ask(3, 34, 8, 0)) <= 8


def test_indices_of_turns_and_repetitions_are_all_different() -> None:
    prompts = (Prompt("a", turns=("a", "b", "c")), Prompt("d"))
    prompt_set = PromptSet("talks", prompts, "")
    every = [
        Occurrence(place, turn, repeat)
        for repeat in range(3)
        for turn in range(3)
        for place in (0, 1)
    ]
    indices = [prompt_set.index(asked) for asked in every]
    assert indices == list(range(18))
    assert [prompt_set.occurrence(index) for index in indices] == every
    assert prompt_set.at(prompt_set.index(Occurrence(0, 2, 1))).text == "c"
    assert prompt_set.first_unused(5) == 18


def test_the_prompt_is_the_unit_however_often_it_is_asked(harness: Harness) -> None:
    Path("ten.txt").write_text("\n".join(f"{number} + 1 =" for number in range(10)))
    harness(*QUICK, "prompts=./ten.txt", "num_prompts=25", "num_warmup=0")
    row = results().iloc[-1]
    assert (row["num_prompts"], row["num_different_prompts"]) == (25, 10)
    assert row["speedup_covers"] == "10 prompts"
    assert pd.isna(row["salted"])  # nothing is cached between questions
    answers = pd.read_csv(only("latency_prompts.csv")).query("arm == 'regular'")
    assert answers.prompt_index.is_unique
    assert list(answers.prompt_place[:10]) == list(range(10)) != list(answers.prompt_place[10:20])
    assert list(answers.asked_before) == [0] * 10 + [1] * 10 + [2] * 5
    assert (answers.unit == answers.prompt_place).all()
    # Greedy answers do not depend on the random numbers, which differ.
    assert answers.groupby("prompt").completion.nunique().eq(1).all()


@pytest.mark.parametrize(("dialect", "salted"), [("vllm", True), ("openai", False)])
def test_a_server_is_asked_past_its_cache(harness: Harness, dialect: str, salted: bool) -> None:
    Path("three.txt").write_text("one\ntwo\nthree")
    server, other = (EchoServer(dialect=dialect, version="1") for _ in range(2))  # type: ignore[arg-type]
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(each)) for each in (server, other)]
        asked = ["engine=server", "model=tiny", f"regular_url={urls[0]}", f"url={urls[1]}"]
        load = ["batch_size=4", "num_prompts=32", "num_warmup=0", "prompts=./three.txt"]
        harness(*QUICK, *asked, *load)
    row = results().iloc[-1]
    assert row["speedup_covers"] == "8 laps of the same texts"
    assert (row["salted"], row["num_different_prompts"]) == (salted, 3)
    measured = [body for body in server.bodies if body["max_tokens"] == 4]
    salts = Counter(body.get("cache_salt") for body in measured)
    keeping_up = [salt for salt in salts if "extra" in (salt or "")]
    assert {salts.pop(salt) for salt in keeping_up} <= {1}
    if dialect == "vllm":
        assert len(salts) == 11
        assert max(salts.values()) == 3
    else:
        assert set(salts) == {None}


def test_a_draft_that_knows_earlier_answers_is_not_asked_again(harness: Harness) -> None:
    complaint = harness.refused("latency", "draft=suffix", "draft.shared=true", "num_prompts=50")
    assert complaint.startswith("num_prompts=50: must be at most 40, the prompts of the set")
