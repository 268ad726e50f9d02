"""Questions for echo servers, and what they answer."""

import asyncio
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from echo_server import continuation
from harness.commands.latency.record import LatencySettings
from harness.config.settings import DecodingSettings, ModelSettings
from harness.engines.protocol import Question
from harness.engines.record import Opening
from harness.servers import record as server
from harness.servers.engine import ServerArm, ServerEngine
from some_questions import question_of
from some_settings import settings_of
from tiny_checkpoints import make_tokenizer

DECODING = DecodingSettings(max_new_tokens=7, temperature=0.5, top_k=9)
TOKENIZER = make_tokenizer()
TINY = ModelSettings(name="tiny", repository="tiny")

Open = Callable[..., ServerEngine]


def ask(num_prompts: int = 1, **decoding: object) -> Question:
    prompts = [[5, 6, 10 + index] for index in range(num_prompts)]
    return question_of(prompts, dataclasses.replace(DECODING, **decoding))


def changed(question: Question, **fields: object) -> Question:
    """The question with other fields of its requests."""
    requests = [dataclasses.replace(request, **fields) for request in question.requests]
    return dataclasses.replace(question, requests=requests)


def texts(question: Question) -> list[list[int]]:
    count = question.decoding.max_new_tokens
    return [continuation(prompt[-1], count) for prompt in question.prompts]


def engine_of(batch_size: int = 1, **settings: object) -> ServerEngine:
    """An engine for servers under these settings of `engine=server`."""
    engine = server.ServerSettings(name="server", **settings)
    run = settings_of(LatencySettings, engine=engine, model=TINY, draft=None)
    opening = Opening(
        settings=run,
        decoding=DECODING,
        planned=SimpleNamespace(tokenizer=TOKENIZER),
        load=lambda: None,
        batch_size=batch_size,
        longest_prompt=0,
        say=lambda message: None,
    )
    opened = server.ServerRecord().open(opening)
    assert isinstance(opened, ServerEngine)
    return opened


def arm_of(engine: ServerEngine) -> ServerArm:
    arm = engine.arms[-1]
    assert isinstance(arm, ServerArm)
    return arm


def time_is_up_when(
    condition: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> list[float | None]:
    """Let requests time out as soon as the condition holds, however slow the machine; the limits that are set then."""
    asked: list[float | None] = []
    waiting: list[asyncio.Task[None]] = []

    async def expire(limit: asyncio.Timeout) -> None:
        while not condition():
            await asyncio.sleep(0.001)
        limit.reschedule(0)

    def timeout(seconds: float | None) -> asyncio.Timeout:
        asked.append(seconds)
        limit = asyncio.timeout(None)
        waiting.append(asyncio.get_running_loop().create_task(expire(limit)))
        return limit

    planted = SimpleNamespace(**vars(asyncio) | {"timeout": timeout})
    monkeypatch.setattr("harness.servers.http.asyncio", planted)
    return asked
