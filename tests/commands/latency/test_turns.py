"""Turns of the arms, and of conversations: laps and batches, prompts that are asked again, each arm's own answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from echo_server import EchoServer, Serve
from harness.commands.latency.measure import Conversations, choose_num_laps
from harness.commands.latency.record import LatencySettings
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.measuring.asking import Part, batches_to_ask, in_laps, laps_to_ask
from harness.measuring.prompts.sets import Occurrence, Prompt, PromptSet
from in_process import QUICKEST_PAIR, Harness, covered, only, results
from some_questions import question_of
from some_settings import settings_of
from tiny_checkpoints import make_tokenizer

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
        laps_to_ask(10, 34, lambda number: 16, 0),
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
    # 16 blocks, of which each begins with a start of the servers.
    assert len(laps_to_ask(10, 40, lambda number: 16, 0)) == 16
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
    assert prompt_set.first_unused(5, 2) == 18


def test_the_prompt_is_the_unit_however_often_it_is_asked(harness: Harness) -> None:
    Path("ten.txt").write_text("\n".join(f"{number} + 1 =" for number in range(10)))
    again = [*QUICK, "prompts=./ten.txt", "num_prompts=25", "num_warmup=0"]
    # Planted times have a verdict, whichever arm happened to be slow.
    harness(*again, "engine=simulated")
    assert covered(results().iloc[-1]["speedup_covers"]).startswith("10 prompts")
    harness(*again)
    row = results().iloc[-1]
    assert (row["num_prompts"], row["num_different_prompts"]) == (25, 10)
    assert pd.isna(row["salted"])  # nothing is cached between questions
    file = Path(row["directory"], "latency_prompts.csv")
    answers = pd.read_csv(file).query("arm == 'regular'")
    assert answers.prompt_index.is_unique
    assert list(answers.prompt_place[:10]) == list(range(10)) != list(answers.prompt_place[10:20])
    assert (answers.unit == answers.prompt_place).all()
    # Greedy answers do not depend on the random numbers, which differ.
    assert answers.groupby("prompt").completion.nunique().eq(1).all()


def test_prompts_are_the_same_where_the_same_is_sent(harness: Harness) -> None:
    """Four conversations with the same last message, and twice the same text, in two categories."""
    go_on = {"role": "user", "content": "Go on."}
    rows: list[dict[str, Any]] = [{"prompt": "One", "category": name} for name in ("a", "b")]
    for number in range(4):
        asked = {"role": "user", "content": f"Story {number}"}
        rows.append({"messages": [asked, {"role": "assistant", "content": "Once"}, go_on]})
    Path("six.jsonl").write_text("\n".join(map(json.dumps, rows)))
    harness(
        "latency", "engine=simulated", "prompts=./six.jsonl", "num_prompts=6", "chat_template=never"
    )
    assert results().iloc[-1]["num_different_prompts"] == 5


@pytest.mark.parametrize(("dialect", "salted"), [("vllm", True), ("openai", False)])
def test_a_server_is_asked_past_its_cache(
    harness: Harness, serve: Serve, dialect: str, salted: bool
) -> None:
    Path("three.txt").write_text("one\ntwo\nthree")
    server, other = (EchoServer(dialect=dialect, version="1") for _ in range(2))
    asked = ["engine=server", "model=tiny", *serve(server, other)]
    load = ["batch_size=4", "num_prompts=32", "num_warmup=0", "prompts=./three.txt"]
    harness(*QUICK, *asked, *load)
    row = results().iloc[-1]
    assert covered(row["speedup_covers"]) == "8 laps of the same prompts"
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


SERVED = ["latency", "engine=server", "model=tiny", "decoding.max_new_tokens=8", "decoding=greedy"]


@pytest.mark.parametrize(
    ("num_prompts", "batch_size", "expected"),
    [(15, 1, 15), (15, 16, 1), (64, 4, 16), (128, 4, 16), (1000, 4, 62)],
)
def test_laps_of_many_prompts_are_long(num_prompts: int, batch_size: int, expected: int) -> None:
    number = choose_num_laps(num_prompts, batch_size)
    assert number == expected
    sizes = [len(lap) for lap in in_laps(num_prompts, number)]
    assert sum(sizes) == num_prompts
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(batch_size, num_prompts)


def test_arms_take_turns_and_the_first_one_changes(harness: Harness, serve: Serve) -> None:
    """Two requests at a time: laps of two, in the order A B B A."""
    server = EchoServer(version="1")
    harness(*SERVED, *serve(server, server), "num_prompts=16", "batch_size=2", "num_warmup=0")
    asked = [body for body in server.bodies[2:] if "extra" not in body["cache_salt"]]
    prompts = [tuple(body["prompt"]) for body in asked]
    laps = [frozenset(prompts[first : first + 2]) for first in range(0, len(prompts), 2)]
    assert len(laps) == 16
    assert laps[0::2] == laps[1::2]
    assert len(set(laps)) == 8
    rows = pd.read_csv(only("latency_prompts.csv"))
    assert sorted(rows["unit"].unique()) == list(range(8))
    assert (rows.groupby("unit").size() == 4).all()
    # The second lap's speculative answers were written before its regular ones, with which they agree.
    assert list(rows["arm"]).count("regular") == 16


def test_a_run_that_ends_between_two_arms_writes_what_it_counts(
    harness: Harness, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second lap the speculative arm answers first."""
    kept: list[Answered] = []

    def keep_and_end(_: Conversations, generation: Answered) -> None:
        kept.append(generation)
        if len(kept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Conversations, "keep", keep_and_end)
    server = EchoServer()
    harness(*SERVED, *serve(server, server), "num_prompts=3", code=130)
    rows = results().set_index("arm")
    assert rows["num_prompts"].to_dict() == {"regular": 1, "speculative": 2}
    written = pd.read_csv(only("latency_prompts.csv"))
    assert written.groupby("arm").size().to_dict() == {"regular": 1, "speculative": 2}
    assert written.groupby("arm").num_tokens.sum().to_dict() == rows["num_tokens"].to_dict()


def test_laps_are_for_engines_that_queue(harness: Harness, serve: Serve) -> None:
    servers = EchoServer(), EchoServer(num_draft_tokens=4)
    addresses = serve(*servers)
    for load, is_interleaved, laps in (("4", True, "2"), ("9", False, "1")):
        harness(*SERVED, *addresses, "num_prompts=9", f"batch_size={load}")
        row = results().iloc[-1]
        assert (row["interleaved"], covered(row["speedup_covers"])[0]) == (is_interleaved, laps)
        assert pd.isna(row["speedup_low"]), "fewer than eight laps"


def test_a_lap_of_a_server_alone_is_a_prompt_or_what_is_in_flight_together(
    harness: Harness, serve: Serve
) -> None:
    [url] = serve(EchoServer())
    for load, units in (([], 9), (["batch_size=2"], 1)):
        harness(*SERVED, url, "num_prompts=9", *load, f"hydra.run.dir=run{units}")
        rows = pd.read_csv(f"run{units}/latency_prompts.csv")
        assert rows["unit"].nunique() == units


def test_warm_up_reads_prompts_that_are_not_measured(harness: Harness, serve: Serve) -> None:
    """The set of the tiny pair has 40; where all are measured their tokens are read in reverse."""
    for number in (9, 40):
        server = EchoServer()
        harness(*SERVED, *serve(server, EchoServer()), f"num_prompts={number}", "num_warmup=1")
        _, warmup, *measured = [tuple(body["prompt"]) for body in server.bodies]
        assert len(measured) == number
        assert warmup not in measured


ROWS = [
    {"turns": ["Ann had a dog.", "It ran away.", "Bob found it."], "category": "dogs"},
    {"turns": ["The sun rose."], "category": "days"},
    {"turns": ["Rain fell all day.", "Then it stopped."], "category": "days"},
]


@pytest.fixture(autouse=True)
def _talks(tmp_path: Path) -> None:
    """Three conversations, of three turns, one and two."""
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


TALK = ["latency", *QUICKEST_PAIR, "prompts=./talks.jsonl", "num_prompts=3", "num_warmup=0"]
TALK += ["chat_template=never", "decoding=greedy", "decoding.max_new_tokens=6"]


def test_latency_answers_all_turns(harness: Harness) -> None:
    harness(*TALK, "prompts.turns=all")
    regular, speculative = results().to_dict("records")
    assert regular["num_prompts"] == speculative["num_prompts"] == 6
    assert speculative["identical_prompts"] == 6
    answers = pd.read_csv(only("latency_prompts.csv")).query("arm == 'regular'")
    assert sorted(answers.turn.dropna()) == [1, 1, 2, 2, 3]
    assert answers.groupby("unit").size().tolist() == [3, 1, 2]


def test_each_arm_goes_on_from_its_own_answers(harness: Harness, serve: Serve) -> None:
    """The chat endpoint of each server gets the messages so far; the two servers answer differently."""
    drafting = EchoServer(version="1", num_draft_tokens=2, stride=3)
    servers = {"regular": EchoServer(version="1"), "speculative": drafting}
    asked = ["engine=server", "model=tiny", "engine.chat=true", "prompts.turns=all"]
    plain = (word for word in TALK if "chat_template" not in word)
    # What two models say is not compared: no verdict.
    harness(*plain, *asked, *serve(*servers.values()), code=3)
    answers = pd.read_csv(only("latency_prompts.csv"))
    first, second, third = ROWS[0]["turns"]
    assistants = []
    for arm, server in servers.items():
        arm_answers = answers[answers.arm == arm].set_index("prompt").completion
        whole = [
            [first, arm_answers[first], second, arm_answers[second], third],
            [first, arm_answers[first], second],
        ]
        chats = [[one["content"] for one in body["messages"]] for body in server.bodies]
        assert all(chat in chats for chat in whole)
        later = [body for body in server.bodies if len(body["messages"]) > 1]
        assert all(body["cache_salt"].endswith((" 0 0", " 0 2")) for body in later)
        assistants.append(arm_answers[first])
    assert assistants[0] != assistants[1]


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
def test_a_cache_may_keep_the_turns_of_one_conversation(
    harness: Harness, serve: Serve, dialect: Any
) -> None:
    """In both arms alike; the first turn finds no cache, in whatever order conversations are asked."""
    servers = EchoServer(dialect=dialect, version="1"), EchoServer(dialect=dialect, version="1")
    harness(*TALK, "engine=server", "model=tiny", "prompts.turns=all", *serve(*servers))
    salts = []
    for server in servers:
        # The first request finds out the form.
        measured = [body for body in server.bodies if body["max_tokens"] == 6]
        if dialect == "llama.cpp":
            salts.append([body.get("cache_prompt") for body in measured])
        else:
            salts.append([body["cache_salt"].split(maxsplit=1)[1] for body in measured])
    cold_then_kept = [False, None, None, False, False, None]
    assert salts[0] == salts[1]
    assert salts[0] == (
        cold_then_kept if dialect == "llama.cpp" else ["0 0", "0 0", "0 0", "0", "0 2", "0 2"]
    )


def test_the_first_turn_alone_is_the_default(harness: Harness) -> None:
    planted = [word for word in TALK if word not in QUICKEST_PAIR]
    harness(*planted, "engine=simulated", "hydra.run.dir=first")
    assert set(results().num_prompts) == {3}
    assert pd.read_csv("first/latency_prompts.csv").turn.isna().all()
    complaint = harness.refused("recovery", "prompts=./talks.jsonl", "prompts.turns=all")
    assert complaint.startswith("prompts.turns=all: all is for latency")


TOKENIZER = make_tokenizer()


class ByLetters:
    """An encoder for a model in this process; prompts have their messages, one after another."""

    settings = settings_of(LatencySettings)
    planned = SimpleNamespace(tokenizer=TOKENIZER)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        messages = [prompt.chat().messages for prompt in prompts]
        return [
            TOKENIZER.encode("".join(message["content"] for message in chat)) for chat in messages
        ]


@pytest.mark.parametrize(
    ("longest", "asked", "num_left_out"),
    [(10, "!abxcyyde", 0), (9, "!abxcyyde", 0), (8, "!cyyde", 1), (5, "!de", 2)],
)
def test_a_turn_that_is_too_long_goes_on_without_the_oldest(
    longest: int, asked: str, num_left_out: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system prompt, here `!`, stays as long as a whole turn does."""
    messages = ({"role": "system", "content": "!"}, {"role": "user", "content": "ab"})
    talk = Prompt("ab", messages=messages, turns=("ab", "c", "de"), line=7)
    encoder: Any = ByLetters()
    conversations = Conversations(encoder, PromptSet("talks", (talk,), ""), longest)
    first = question_of([[1]], DecodingSettings())
    second, third = conversations.follow_ups(first)
    for arm in ("regular", "speculative"):
        for question, answer in ((first, "x"), (second, "yy")):
            [index] = [request.index for request in question.requests]
            # What ends a text is none of it.
            token_ids = [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
            record = RequestRecord(index, 1, token_ids=token_ids)
            conversations.keep(Answered(arm=arm, requests=[record], seconds=1.0))
        [request] = conversations.for_arm(third, arm).requests
        assert TOKENIZER.decode(request.prompt) == asked
    said = capsys.readouterr().err
    assert said.count("turn 3 of the prompt in line 7") == bool(num_left_out)
    assert not num_left_out or f"({num_left_out})" in said
