"""The shipped pair behind the OpenAI API: an echo server that answers with our loop, honestly or not."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from echo_server import FIRST_LETTER, EchoServer
from harness.config.demand import Demand
from harness.config.settings import DecodingSettings, PlacementSettings
from harness.engines.protocol import Arm
from harness.engines.record import Preparation
from harness.local.drafting.method import Pair
from harness.local.engine.engine import LocalEngine
from harness.local.engine.pair import plan_pair
from some_questions import question_of
from tiny_checkpoints import as_draft, shipped

_MOST = 64
# The arms of an engine share its models, so that one works at a time.
_THREAD = ThreadPoolExecutor(1)

Tokens = list[list[int]]


@dataclass
class PairServer(EchoServer):
    """Requests that wait are answered as one batch.

    Attributes:
        arm: that answers.
        temperature_factor: the fault of a server that draws at another temperature than it was asked for.
    """

    arm: Arm | None = None
    temperature_factor: float = 1.0
    spoil: Callable[[Tokens], Tokens] = lambda tokens: tokens
    _waiting: list[tuple[dict[str, Any], asyncio.Future[list[int]]]] = field(default_factory=list)
    _busy: bool = False
    _num_asked: Counter[tuple[int, ...]] = field(default_factory=Counter)

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | None]:
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((body, answer))
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().create_task(self._work())
        tokens = await answer
        text = "".join(chr(FIRST_LETTER + t % 26) for t in tokens)
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "length"}
        if self.dialect == "vllm":
            choice["token_ids"] = tokens
        yield {"object": "text_completion", "choices": [choice]}
        yield {"choices": [], "usage": {"completion_tokens": len(tokens)}}
        yield None

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0.002)
            first, _ = self._waiting[0]
            alike = [one for one in self._waiting if _settings(one[0]) == _settings(first)][:_MOST]
            self._waiting = [one for one in self._waiting if one not in alike]
            bodies = [body for body, _ in alike]
            answers = await asyncio.get_running_loop().run_in_executor(
                _THREAD, self._generate, bodies
            )
            for (_, answer), tokens in zip(alike, answers, strict=True):
                answer.set_result(tokens)
        self._busy = False

    def _generate(self, bodies: list[dict[str, Any]]) -> Tokens:
        temperature, max_new_tokens, stop_tokens = _settings(bodies[0])
        decoding = DecodingSettings(
            temperature=temperature * self.temperature_factor, max_new_tokens=max_new_tokens
        )
        prompts = [body["prompt"] for body in bodies]
        indices = [self._index(tuple(prompt)) for prompt in prompts]
        question = question_of(prompts, decoding, 0, indices, stop_tokens=stop_tokens)
        return self.spoil(self.arm.answer(question.requests, len(prompts)).tokens)

    def _index(self, prompt: tuple[int, ...]) -> int:
        """The place of an answer's random numbers: those of all answers to a prompt are the same in any order."""
        self._num_asked[prompt] += 1
        return zlib.crc32(bytes(str(prompt), "ascii")) + self._num_asked[prompt]


def _settings(body: dict[str, Any]) -> tuple[float, int, frozenset[int]]:
    return body["temperature"], body["max_tokens"], frozenset(body.get("stop_token_ids", ()))


def shipped_pair(*names: str) -> Pair:
    """tiny with tiny_draft, or the two models of these names, loaded."""
    target, draft = shipped(*names or ("tiny", "tiny_draft"))
    planned = plan_pair(target, as_draft(draft), PlacementSettings())
    return planned.place(Demand(64, 64, 16, 4, "eager")).load()


def pair_servers(pair: Pair, fault: str = "none", **changes: Any) -> tuple[PairServer, PairServer]:
    """A server for each arm, the regular one first; the changes are of the one that speculates."""
    regular, speculative = LocalEngine(
        pair, Preparation(decoding=DecodingSettings(), fault=fault)
    ).arms  # type: ignore[arg-type]
    shared = {name: value for name, value in changes.items() if name == "dialect"}
    return PairServer(arm=regular, **shared), PairServer(arm=speculative, **changes)
