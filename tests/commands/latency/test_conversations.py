"""Conversations of several turns: each arm goes on from its own answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from echo_server import EchoServer, Serve
from harness.commands.latency.measure import Conversations
from harness.commands.latency.record import LatencySettings
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.measuring.prompts.sets import Prompt, PromptSet
from in_process import QUICKEST_PAIR, Harness, only, results
from some_questions import question_of
from some_settings import settings_of
from tiny_checkpoints import make_tokenizer

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
        assert all(body["cache_salt"].endswith(" 0") for body in later)
        assistants.append(arm_answers[first])
    assert assistants[0] != assistants[1]


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
    [(10, "!abxcyyde", 0), (9, "!abxcyyde", 0), (8, "!cyyde", 1), (5, "!de", 2), (2, "de", 2)],
)
def test_a_turn_that_is_too_long_goes_on_without_the_oldest_and_is_cut_at_last(
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
