"""Conversations of several turns: each arm goes on from its own answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from harness.commands.latency.conversations import Conversations
from harness.config.settings import DecodingSettings, PromptSettings
from harness.engines.protocol import Question
from harness.prompts.sets import Prompt, load_prompts
from in_process import QUICKEST_PAIR, Harness, only, results
from wording import mentions

ROWS = [
    {"turns": ["Ann had a dog.", "It ran away.", "Bob found it."], "category": "dogs"},
    {"turns": ["The sun rose."], "category": "days"},
    {"turns": ["Rain fell all day.", "Then it stopped."], "category": "days"},
]


@pytest.fixture
def settings(tmp_path: Path) -> PromptSettings:
    """Three conversations, of three turns, one and two."""
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return PromptSettings(name="talks", file=str(file), turns="all")


def fake_session(asked: list[list[str]]) -> Any:
    """A session whose tokens are the numbers of words, and which notes the chats that it encodes."""

    def encode(prompts: list[Prompt], **_: Any) -> list[list[int]]:
        chats = [prompt.chat() for prompt in prompts]
        asked.extend([message["content"] for message in chat] for chat in chats)
        return [[len(message["content"].split()) for message in chat] for chat in chats]

    def decode(tokens: list[int], **_: Any) -> str:
        return "yes " * len(tokens)

    tokenizer = SimpleNamespace(decode=decode)
    return SimpleNamespace(
        encode_unchecked=encode,
        tokenizer=tokenizer,
        planned=SimpleNamespace(room=lambda new_tokens: None),
        settings=SimpleNamespace(engine=SimpleNamespace(name="local")),
    )


def answered(arm: str, question: Question, length: int) -> Any:
    requests = [SimpleNamespace(index=i, token_ids=[1] * length) for i in question.indices]
    return SimpleNamespace(arm=arm, requests=requests)


def test_each_arm_goes_on_from_its_own_answers(settings: PromptSettings) -> None:
    asked: list[list[str]] = []
    prompt_set = load_prompts(settings)
    first = Question([[1], [1], [1]], DecodingSettings(max_new_tokens=4), 0, [0, 1, 2])
    conversations = Conversations(fake_session(asked), prompt_set, first)
    first = dataclasses.replace(first, chats=[prompt.chat() for prompt in prompt_set.prompts])
    second, third = conversations.follow_ups(first)
    assert (list(second.indices), list(third.indices)) == ([3, 5], [6])
    assert [prompt_set.at(index).turn for index in (0, 1, 5, 6)] == [1, None, 2, 3]
    assert prompt_set.at(6).text == "Bob found it."
    for question in (first, second):
        conversations.keep(answered("regular", question, 1))
        conversations.keep(answered("speculative", question, 2))
    assert conversations.for_arm(first, "regular") is first
    asked.clear()
    later = conversations.for_arm(third, "regular")
    conversations.for_arm(third, "speculative")
    regular, speculative = asked
    # A server's chat endpoint gets the same messages, and not those of the first turn.
    assert [message["content"] for message in later.chats[0]] == regular
    assert not second.chats
    assert regular == ["Ann had a dog.", "yes ", "It ran away.", "yes ", "Bob found it."]
    assert speculative[1::2] == ["yes yes ", "yes yes "]


TALK = (
    *(
        "latency",
        *QUICKEST_PAIR,
        "prompts=./talks.jsonl",
        "num_prompts=3",
        "chat_template=never",
        "num_warmup=0",
    ),
    *("decoding=greedy", "decoding.max_new_tokens=6"),
)


@pytest.mark.usefixtures("settings")
def test_latency_answers_all_turns(harness: Harness) -> None:
    outcome = harness(*TALK, "prompts.turns=all")
    assert "turn 3" in outcome.summary
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


@pytest.mark.usefixtures("settings")
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


@pytest.mark.usefixtures("settings")
def test_a_conversation_that_does_not_fit_is_refused_or_left_out(harness: Harness) -> None:
    long_talk(turn_3="Bob found it. " * 60)
    whole = (*TALK, "prompts.turns=all")
    complaint = harness.refused(*whole)
    assert complaint.startswith("prompts: 1 of 3 prompts are too long (line 1 of the file); ")
    # Two answers of 6 tokens, and what they may grow by when they are read again, come before it.
    assert mentions(complaint, "with the answers", "decoding.max_new_tokens=6", "takes 512")
    assert "prompts.too_long=skip leaves them out" in complaint
    outcome = harness(*whole, "prompts.too_long=skip")
    assert mentions(outcome.stderr, "1 of 3 prompts", "line 1", "left out")
    assert list(results()["num_skipped"]) == [1, 1]
    assert set(pd.read_csv(only("latency_prompts.csv")).turn.dropna()) == {1, 2}


@pytest.mark.usefixtures("settings")
def test_whole_turns_are_cut_and_the_system_prompt_stays(harness: Harness) -> None:
    """The third turn has room for the second one, not for both; the first two have room for all."""
    long_talk(turn_1="Ann had a dog. " * 30, turn_3="Bob found it. " * 30)
    whole = (*TALK, "prompts.turns=all", "prompts.system=Answer.")
    outcome = harness(*whole, "prompts.too_long=truncate")
    assert mentions(outcome.stderr, "1 of 3 prompts", "line 1", "oldest turns")
    assert mentions(outcome.stderr, "turn 3", "line 1", "without its first turn")
    assert list(results()["num_truncated"]) == [1, 1]
    answers = pd.read_csv(only("latency_prompts.csv")).query("arm == 'regular'")
    away, found = (answers.query(f"turn == {turn}").completion.iloc[0] for turn in (2, 3))
    talk = f"user: It ran away.\nassistant: {away}\nuser: {'Bob found it. ' * 30}\nassistant:"
    Path("one.json").write_text(json.dumps([{"prompt": f"system: Answer.\n{talk}"}]))
    harness(*TALK, "prompts=./one.json", "num_prompts=1", "hydra.run.dir=again")
    assert set(pd.read_csv("again/latency_prompts.csv").completion) == {found}


@pytest.mark.usefixtures("settings")
def test_answers_that_grow_when_they_are_read_again_cost_a_turn(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if answers were read with fewer tokens than they were written with."""
    monkeypatch.setattr("harness.measuring.encoding._MARGIN", -6)
    outcome = harness(*TALK, "prompts.turns=all")
    assert outcome.stderr.count("without its first") == 1, "said once"
    answers = pd.read_csv(only("latency_prompts.csv")).query("arm == 'regular'")
    away = answers.query("turn == 2").completion.iloc[0]
    Path("one.json").write_text(json.dumps([{"prompt": "user: It ran away.\nassistant:"}]))
    harness(*TALK, "prompts=./one.json", "num_prompts=1", "hydra.run.dir=again")
    assert set(pd.read_csv("again/latency_prompts.csv").completion) == {away}
