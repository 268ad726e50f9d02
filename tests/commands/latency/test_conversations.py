"""Conversations of several turns: each arm goes on from its own answers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest

from echo_server import EchoServer, serving
from in_process import QUICKEST_PAIR, Harness, only, results
from wording import mentions

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
    # The same text as a single prompt has the same answer.
    spoken = dict(zip(answers.prompt, answers.completion, strict=True))
    dog, away = (spoken[text] for text in ROWS[0]["turns"][:2])
    talk = f"user: Ann had a dog.\nassistant: {dog}\nuser: It ran away.\nassistant:"
    Path("one.json").write_text(json.dumps([{"prompt": talk}]))
    harness(*TALK, "prompts=./one.json", "num_prompts=1", "hydra.run.dir=again")
    again = pd.read_csv("again/latency_prompts.csv")
    assert set(again.completion) == {away}


def test_each_arm_goes_on_from_its_own_answers(harness: Harness) -> None:
    """The chat endpoint of each server gets the messages so far; the two servers answer differently."""
    drafting = EchoServer(version="1", num_draft_tokens=2, stride=3)
    servers = {"regular": EchoServer(version="1"), "speculative": drafting}
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(server)) for server in servers.values()]
        addresses = [f"engine.regular_url={urls[0]}", f"engine.url={urls[1]}"]
        asked = ["engine=server", "model=tiny", "engine.chat=true", "prompts.turns=all", *addresses]
        # What two models say is not compared: no verdict.
        harness(*(word for word in TALK if "chat_template" not in word), *asked, code=3)
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
        assert all(body["cache_salt"].endswith(" 0") for body in later)
        assistants.append(arm_answers[first])
    assert assistants[0] != assistants[1]


def test_the_first_turn_alone_is_the_default(harness: Harness) -> None:
    harness(*TALK, "hydra.run.dir=first")
    assert set(results().num_prompts) == {3}
    assert pd.read_csv("first/latency_prompts.csv").turn.isna().all()
    complaint = harness.refused("recovery", "prompts=./talks.jsonl", "prompts.turns=all")
    assert complaint.startswith("prompts.turns=all: all is for latency")


def long_talk(**turns: str) -> None:
    """The conversation of three turns has these in place of its own, by number."""
    rows = [
        dict(
            ROWS[0],
            turns=[turns.get(f"turn_{n}", text) for n, text in enumerate(ROWS[0]["turns"], 1)],
        )
    ]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, [*rows, *ROWS[1:]])))


def test_a_conversation_that_does_not_fit_is_left_out(harness: Harness) -> None:
    long_talk(turn_3="Bob found it. " * 60)
    whole = [*TALK, "prompts.turns=all"]
    harness(*whole, "prompts.too_long=skip")
    assert list(results()["num_skipped"]) == [1, 1]
    assert set(pd.read_csv(only("latency_prompts.csv")).turn.dropna()) == {1, 2}
    # A turn that is too long by itself is cut.
    cut = harness(*whole, "prompts.too_long=truncate", "hydra.run.dir=cut")
    assert mentions(cut.stderr, "turn 3", "line 1", "(2)")
    assert list(pd.read_csv("cut/latency_prompts.csv").turn).count(3) == 2


def test_whole_turns_are_cut_and_the_system_prompt_stays(harness: Harness) -> None:
    """The third turn has room for the second one, not for both; the first two have room for all."""
    long_talk(turn_1="Ann had a dog. " * 30, turn_3="Bob found it. " * 30)
    whole = [*TALK, "prompts.turns=all", "prompts.system=Answer."]
    outcome = harness(*whole, "prompts.too_long=truncate")
    [line] = [line for line in outcome.stderr.splitlines() if "without its first turn" in line]
    assert mentions(line, "turn 3", "line 1", "(1)")
    assert list(results()["num_truncated"]) == [1, 1]
    answers = pd.read_csv(only("latency_prompts.csv")).query("arm == 'regular'")
    away, found = (answers.query(f"turn == {turn}").completion.iloc[0] for turn in (2, 3))
    talk = f"user: It ran away.\nassistant: {away}\nuser: {'Bob found it. ' * 30}\nassistant:"
    Path("one.json").write_text(json.dumps([{"prompt": f"system: Answer.\n{talk}"}]))
    harness(*TALK, "prompts=./one.json", "num_prompts=1", "hydra.run.dir=again")
    assert set(pd.read_csv("again/latency_prompts.csv").completion) == {found}
