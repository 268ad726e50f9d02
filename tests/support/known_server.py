"""A server of known times, which writes down what it did: the truth that a page of `latency` is compared with.

It answers one request after another, or several at once, and notes of each answer when its tokens went out, and what
every iteration drafted and accepted. Its reports are those of an `EchoServer` of the same dialect.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from echo_server import EchoServer, _text, continuation


@dataclass
class NotedAnswer:
    """What the server did for an answer.

    Attributes:
        seconds: from the request to each burst of tokens that was sent; the first has one token.
        outcomes: (drafted, accepted) of each iteration after the first token, (0, 0) of one that drafted nothing.
    """

    seconds: list[float]
    outcomes: list[tuple[int, int]]
    num_tokens: int = 0


Outcomes = Sequence[tuple[int, int]]
Reports = Literal["iterations", "histogram", "totals", "counters"]


def iterations_of(drafts: Outcomes, num_tokens: int, known_end: int) -> list[tuple[int, int]]:
    """(drafted, accepted) of an answer's iterations after its first token, (0, 0) of one that drafts nothing.

    Args:
        drafts: of the first iterations, which come again; none at all where it is empty.
        known_end: the last iteration drafts no more than is lacking to these tokens.
    """
    outcomes = []
    place = 1
    while place < num_tokens:
        drafted, accepted = drafts[len(outcomes) % len(drafts)] if drafts else (0, 0)
        drafted = min(drafted, known_end - place - 1)
        outcomes.append((drafted, min(accepted, drafted)))
        place += 1 + outcomes[-1][1]
    return outcomes


def report_of(reports: Reports, outcomes: Outcomes) -> dict[str, Any]:
    """What the last event of an answer has about its drafts; nothing where counters have it."""
    drafting = [outcome for outcome in outcomes if outcome[0]]
    num_drafted = sum(drafted for drafted, _ in drafting)
    num_accepted = sum(accepted for _, accepted in drafting)
    if reports == "counters":
        return {}
    if reports == "totals":
        # llama.cpp leaves out zeros.
        timings = {"draft_n": num_drafted, "draft_n_accepted": num_accepted}
        return {"timings": timings} if num_drafted else {}
    histogram = [0] * (1 + max((accepted for _, accepted in drafting), default=0))
    for _, accepted in drafting:
        histogram[accepted] += 1
    found: dict[str, Any] = {
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": num_accepted,
        "acceptance_histogram": histogram,
    }
    if reports == "iterations":
        found["per_step_drafted"] = [drafted for drafted, _ in drafting]
        found["per_step_accepted"] = [accepted for _, accepted in drafting]
    return {"metrics": {"speculative_decoding": found}}


@dataclass
class KnownServer(EchoServer):
    """The times that it takes, how it drafts, and how it reports that.

    Attributes:
        first_s: until the first token.
        step_s: of each iteration, whether it drafts or not.
        lengths: tokens of answers, by prompt in turn of its hash; as many as asked for where empty.
        drafts: (drafted, accepted) of an answer's iterations, from the first on and again; (0, 0) drafts nothing.
        reports: each iteration, a histogram, totals, or nothing (then its page has counters).
        counts_behind_ends: whether an answer that ends by itself is drafted and counted beyond its end, as engines do,
            which do not know it before.
        held_tokens: tokens that it sends together, before further ones, as behind hidden thoughts or a proxy.
        slots: requests that it works on at once.
        noted: every answer, in the order of their ends.
    """

    first_s: float = 0.02
    step_s: float = 0.002
    lengths: Sequence[int] = ()
    drafts: Sequence[tuple[int, int]] = ()
    reports: Reports = "counters"
    counts_behind_ends: bool = False
    held_tokens: int = 1
    slots: int = 1
    noted: list[NotedAnswer] = field(default_factory=list)
    num_proposed: int = 0
    _free: asyncio.Semaphore | None = None

    def __post_init__(self) -> None:
        self.metrics = self.reports == "counters"
        if self.drafts:
            self.num_draft_tokens = max(drafted for drafted, _ in self.drafts)
        if self.reports == "totals":
            self.dialect = "llama.cpp"

    async def _complete(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if body.get("stream"):
            return await super()._complete(body, reader, writer)
        chunks = [chunk async for chunk in self._chunks(body) if chunk]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [choice.get("text") or choice["delta"]["content"] for choice in choices]
        message = {"role": "assistant", "content": "".join(texts)}
        choice = {"index": 0, "text": message["content"], "message": message}
        self._send(writer, 200, {**chunks[-1], "choices": [choice | {"finish_reason": "length"}]})
        return True

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | None]:
        received = time.perf_counter()
        prompt = body.get("prompt", body.get("messages"))
        count = body["max_tokens"]
        if self.lengths:
            place = zlib.crc32(str(prompt).encode()) % len(self.lengths)
            count = min(count, self.lengths[place])
        tokens = continuation(len(str(prompt)), count)
        noted = NotedAnswer([], [], count)
        if self._free is None:
            self._free = asyncio.Semaphore(self.slots)
        async with self._free:
            # As engines do, which do not know it before, an answer may be drafted beyond its end.
            known_end = body["max_tokens"] if self.counts_behind_ends else count
            noted.outcomes = iterations_of(self.drafts, count, known_end)
            place = 0
            held: list[int] = []
            for drafted, accepted in [(0, 0), *noted.outcomes]:
                await asyncio.sleep(self.step_s if place else self.first_s)
                self.num_drafts += drafted > 0
                self.num_proposed += drafted
                self.num_accepted += accepted
                new = tokens[place : place + 1 + accepted]
                held += new
                place += len(new)
                self.num_tokens += len(new)
                if place < min(self.held_tokens, count):
                    continue
                step, held = held, []
                choice: dict[str, Any] = {"index": 0, "finish_reason": None}
                if place >= count:
                    choice["finish_reason"] = "length"
                if "messages" in body:
                    choice["delta"] = {"content": _text(step)}
                else:
                    choice["text"] = _text(step)
                if self.dialect == "vllm" and body.get("return_token_ids"):
                    choice["token_ids"] = step
                noted.seconds.append(time.perf_counter() - received)
                yield {"object": "text_completion", "choices": [choice]}
        self.noted.append(noted)
        usage = {"completion_tokens": count, "prompt_tokens": None}
        last: dict[str, Any] = {"choices": [], "usage": usage}
        if self.drafts:
            last |= report_of(self.reports, noted.outcomes)
        yield last
        yield None

    def _counters(self) -> str:
        page = super()._counters()
        lines = []
        for line in page.splitlines():
            if "num_draft_tokens_total" in line:
                line = f"{line.split(' ')[0]} {self.num_proposed}"
            # The echo server's own count of its one position.
            if "per_pos_total" not in line:
                lines.append(line)
        return "\n".join(lines) + "\n"
