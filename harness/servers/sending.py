"""Sends requests to one server, and reads their answers into records.

`Sender` has what can happen to a request: it is answered, refused, cut off, times out, is sent again
once, or is not sent because the server is gone. `send_all` decides when each of many is sent, beside
further ones that keep up the load.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config.errors import HarnessError, RunError, from_outside
from harness.config.packages import INSTALL_LOCAL, missing_local
from harness.engines.rates import has_built_up
from harness.engines.requests import Load, RequestError, RequestRecord
from harness.engines.text_tokenizer import TextTokenizer
from harness.engines.tokenizer import Tokenizer
from harness.servers.connection import RequestFailed, answer_to, events
from harness.servers.events import (
    check_drafts,
    check_length,
    check_usage,
    joined_surrogates,
    note_event,
    read_event,
)

if TYPE_CHECKING:
    import httpx2

    from harness.servers.settings import ServerSettings

# Requests without an answer in a row, beyond those that are in flight together, after which no more
# are sent: each may take `engine.timeout_s`.
_MOST_UNANSWERED = 4
# Characters that are shown of a line that is no JSON.
_LONGEST_LINE = 60


@dataclass(frozen=True)
class Outgoing:
    """A request that is to be sent.

    Attributes:
        body: of OpenAI's API.
        request: its record.
        add: gets the tokens as they arrive; those of an answer of text alone at its end, if it has any.
    """

    body: dict[str, Any]
    request: RequestRecord
    add: Callable[[list[int]], None] = lambda tokens: None


class Sender:
    """Sends requests to one server until too many in a row had no answer.

    Args:
        client: of the server's API.
        tokenizer: of the model that is served.
        settings: of `engine=server`.

    Attributes:
        given_up: why no more requests are sent; None while they are.
        num_in_flight: the requests that are sent and have not ended.
        last_event: when anything last came from the server, by `time.perf_counter`.
    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        tokenizer: Tokenizer,
        settings: ServerSettings,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._knows_tokens = not isinstance(tokenizer, TextTokenizer)
        self._settings = settings
        self._num_unanswered = 0
        self.given_up: str | None = None
        self.num_in_flight = 0
        self.last_event = 0.0
        self._request_seconds = 0.0
        self._counted_until = 0.0

    def request_seconds(self) -> float:
        """The times of all requests so far, added up. Called whenever the number in flight is about to change."""
        now = time.perf_counter()
        self._request_seconds += self.num_in_flight * (now - self._counted_until)
        self._counted_until = now
        return self._request_seconds

    async def send(self, outgoing: Outgoing) -> None:
        """Send one request, and note in its record how that went, failure included."""
        request = outgoing.request
        if self.given_up is not None:
            request.error = RequestError(0, self.given_up)
            return
        timeout_s = self._settings.timeout_s
        was_answered = True
        self.request_seconds()
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(outgoing)
        except TimeoutError:
            was_answered = False
            request.error = RequestError(408, f"Timeout: no end after {timeout_s:g} s")
        except asyncio.CancelledError:
            request.error = RequestError(499, "Cancelled: not read to its end")
            num_shown = max(len(request.token_ids), len(request.shown_ids))
            request.num_tokens = max(num_shown, len(request.arrivals))
            raise
        except Exception as error:
            code = 0
            was_answered = isinstance(error, HarnessError)
            if isinstance(error, RequestFailed):
                code = error.code
                was_answered = code > 0
            message = str(error)
            if isinstance(error, json.JSONDecodeError):
                message += f": {error.doc.strip()[:_LONGEST_LINE]}"
            reason = from_outside(message).rstrip(".")
            if not isinstance(error, HarnessError):
                reason = f"{type(error).__name__}: {reason}"
            request.error = RequestError(code, reason)
        finally:
            self.request_seconds()
            self.num_in_flight -= 1
        if was_answered or request.arrivals:
            self._num_unanswered = 0
        else:
            self._num_unanswered += 1
        if self._num_unanswered > _MOST_UNANSWERED + self.num_in_flight:
            number = f"{self._num_unanswered} requests in a row had no answer"
            self.given_up = f"{number}, the last with {request.error}; no more are sent"
        request.text = joined_surrogates(request.text)
        if not self._knows_tokens:
            self._take_counts(request)
        if not request.token_ids:
            # llama.cpp shows ids; the parser of a chat holds some back.
            shows_all = request.num_tokens > 0 and len(request.shown_ids) == request.num_tokens
            if shows_all and self._settings.chat is not True and self._knows_tokens:
                request.token_ids = request.shown_ids
            else:
                request.from_text = True
                request.token_ids = self._tokenizer.encode(request.text, add_special_tokens=False)
            outgoing.add(request.token_ids)
        request.num_tokens = request.num_tokens or len(request.token_ids)
        request.count_undrafted()

    @staticmethod
    def _take_counts(request: RequestRecord) -> None:
        """Take the server's counts of tokens, where nobody can count them here."""
        request.num_prompt_tokens = request.num_read or request.num_prompt_tokens
        request.num_tokens = request.num_tokens or len(request.token_ids)
        # Nobody here can read ids: those of the text take their place.
        request.shown_ids = request.token_ids or request.shown_ids
        request.token_ids = []
        is_whole = request.error is None and not request.may_be_left
        if is_whole and request.text and not request.num_tokens:
            reason = (
                "the server does not count its tokens, and no tokenizer is here: model= names one"
            )
            if missing_local():
                reason += f" ({INSTALL_LOCAL})"
            request.error = RequestError(0, reason)

    async def _read(self, outgoing: Outgoing) -> None:
        """Read an answer to its end. Raises AnswerError where it says what cannot be true."""
        body, request = outgoing.body, outgoing.request
        finished = False
        usage: int | None = None
        # Several answers to one request come mixed.
        max_tokens = body["max_tokens"] * body.get("n", 1)
        path = "chat/completions" if self._settings.chat is True else "completions"
        started = time.perf_counter()
        try:
            async with answer_to(self._client, path, body) as response:
                async for content in events(response):
                    self.last_event = time.perf_counter()
                    event = read_event(content)
                    note_event(request, event, self.last_event - started)
                    check_length(max(len(request.token_ids), len(request.shown_ids)), max_tokens)
                    if event.token_ids and self._knows_tokens:
                        outgoing.add(event.token_ids)
                    if request.may_be_left:
                        return
                    finished = finished or event.is_last
                    usage = usage if event.num_tokens is None else event.num_tokens
        finally:
            request.seconds = time.perf_counter() - started
        if not finished:
            raise RunError("the answer ended without a finish_reason")
        if usage is not None:
            request.num_tokens = len(request.token_ids) or usage
            check_usage(usage, request, max_tokens)
        check_drafts(request, request.num_tokens or max_tokens)


async def send_all(
    sender: Sender,
    requests: Sequence[Outgoing],
    num_in_flight: int,
    rate: float | None,
    times: Sequence[float],
    extra: Iterator[Outgoing] | None,
) -> Load:
    """Send requests, wait until the last has ended, and return what was in flight meanwhile.

    Args:
        num_in_flight: the most that have not ended; without effect at a rate.
        rate: requests per second; None to send one wherever there is room.
        times: at a rate, the seconds after which each of `requests` is sent.
        extra: requests without end that do not count, with which the load neither builds up nor
            drains: at a rate before and behind the others, else in the places of those that have
            ended, when no others wait. What is left of them is cancelled.
    """
    room = asyncio.Semaphore(sys.maxsize if rate else num_in_flight)
    tasks: list[asyncio.Task[None]] = []
    extra_records: list[RequestRecord] = []
    an_extra_has_ended = asyncio.Event()
    num_ended = 0
    most_in_flight = 0

    async def send(outgoing: Outgoing) -> None:
        try:
            await sender.send(outgoing)
        finally:
            room.release()

    async def send_one_extra(outgoing: Outgoing) -> None:
        nonlocal num_ended
        await send(outgoing)
        num_ended += 1
        an_extra_has_ended.set()

    async def send_extra(requests: Iterator[Outgoing], wait_s: float = 0.0) -> None:
        nonlocal most_in_flight
        await asyncio.sleep(wait_s)
        await room.acquire()
        # A server that refuses them at once would be flooded.
        while not any(record.error for record in extra_records):
            outgoing = next(requests)
            extra_records.append(outgoing.request)
            tasks.append(asyncio.create_task(send_one_extra(outgoing)))
            most_in_flight = max(most_in_flight, len(extra_records) - num_ended)
            if rate:
                await asyncio.sleep(random.expovariate(rate))
            await room.acquire()

    try:
        if rate and extra is not None:
            leading = asyncio.create_task(send_extra(extra))
            tasks.append(leading)
            while not has_built_up(num_ended, most_in_flight):
                # None is sent behind one that failed.
                if any(record.error for record in extra_records):
                    break
                an_extra_has_ended.clear()
                await an_extra_has_ended.wait()
            leading.cancel()
        started = time.perf_counter()
        seconds_before = sender.request_seconds()
        num_arrived_before = sum(len(record.arrivals) for record in extra_records)
        own_tasks = []
        for index, outgoing in enumerate(requests):
            if rate:
                await asyncio.sleep(started + times[index] - time.perf_counter())
            await room.acquire()
            own_tasks.append(asyncio.create_task(send(outgoing)))
            tasks.append(own_tasks[-1])
        if extra is not None:
            wait_s = random.expovariate(rate) if rate else 0.0
            tasks.append(asyncio.create_task(send_extra(extra, wait_s)))
        await asyncio.gather(*own_tasks)
        num_extra = sum(len(record.arrivals) for record in extra_records) - num_arrived_before
        num_own = sum(len(outgoing.request.arrivals) for outgoing in requests)
        return Load(
            request_seconds=sender.request_seconds() - seconds_before,
            seconds=time.perf_counter() - started,
            share=num_own / (num_own + num_extra) if num_own else 1.0,
            extra=extra_records,
            offered_s=times[-1] if rate else 0.0,
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
