"""Sends requests to one server, and reads their answers into records.

`Sender` has what can happen to a request: it is answered, refused, cut off, times out, is sent again
once, or is not sent because the server is gone. `send_all` decides when each of many is sent, beside
a `Background` that keeps up the load.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from harness.config.errors import HarnessError, RunError, from_outside
from harness.engines.protocol import Question
from harness.engines.requests import Load, RequestError, RequestRecord
from harness.engines.server.connection import closed_by_server, events, is_about_connections, sent
from harness.engines.server.events import (
    check_length,
    check_usage,
    joined_surrogates,
    note_event,
    read_event,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Requests without an answer in a row, beyond those that are in flight together, after which no more
# are sent: each may take `engine.timeout_s`.
_MOST_UNANSWERED = 4


# The body of a request, its record, and what gets its tokens as they arrive.
Outgoing = tuple[dict[str, Any], RequestRecord, Callable[[list[int]], None]]


class Sender:
    """Sends requests to one server until too many in a row had no answer.

    Args:
        client: OpenAI's, for the server's API.
        tokenizer: of the model that is served.
        settings: of `engine=server`.

    Attributes:
        given_up: why no more requests are sent; None while they are.
        num_in_flight: the requests that are sent and have not ended.
        last_event: when anything last came from the server, by `time.perf_counter`.
    """

    def __init__(self, client: Any, tokenizer: PreTrainedTokenizerBase, settings: Any) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._settings = settings
        self._num_unanswered = 0
        self.given_up: str | None = None
        self.num_in_flight = 0
        self.last_event = 0.0
        self._request_seconds = 0.0
        self._counted_until = 0.0

    def request_seconds(self) -> float:
        """The times of all requests so far, added up."""
        now = time.perf_counter()
        self._request_seconds += self.num_in_flight * (now - self._counted_until)
        self._counted_until = now
        return self._request_seconds

    async def send(
        self, body: dict[str, Any], request: RequestRecord, add: Callable[[list[int]], None]
    ) -> None:
        """Send one request, and note in its record how that went, failure included.

        Args:
            body: arguments of OpenAI's client.
            add: gets the tokens as they arrive; those of an answer of text alone at its end; an
                empty list where there are none.
        """
        if self.given_up is not None:
            request.error = RequestError(0, "NotSent", self.given_up)
            add([])
            return
        timeout_s = self._settings.timeout_s
        failure: Exception | None = None
        self.request_seconds()
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._read_or_read_again(body, request, add)
        except TimeoutError as error:
            failure = error
            request.error = RequestError(408, "Timeout", f"no end after {timeout_s:g} s")
        except asyncio.CancelledError:
            request.error = RequestError(499, "Cancelled", "not read to its end")
            num_shown = max(len(request.token_ids), len(request.shown_ids))
            request.num_tokens = max(num_shown, len(request.arrivals))
            raise
        except Exception as error:
            failure = error
            request.error = self._explained(error)
        finally:
            self.request_seconds()
            self.num_in_flight -= 1
        self._count_unanswered(request, failure)
        request.text = joined_surrogates(request.text)
        if not request.token_ids:
            self._set_tokens(request)
            add(request.token_ids)
        request.num_tokens = request.num_tokens or len(request.token_ids)

    async def _read_or_read_again(
        self, body: dict[str, Any], request: RequestRecord, add: Callable[[list[int]], None]
    ) -> None:
        """Read the answer, at a second attempt if the server had closed a kept-alive connection."""
        try:
            await self._read(body, request, add)
        except Exception as error:
            # A server that died of a request does not get it twice.
            if request.on_new_connection or not closed_by_server(error):
                raise
            request.sent_again = True
            await self._read(body, request, add)

    async def _read(
        self, body: dict[str, Any], request: RequestRecord, add: Callable[[list[int]], None]
    ) -> None:
        """Read an answer to its end. Raises AnswerError where it says what cannot be true."""
        finished = False
        usage: int | None = None
        max_tokens = body["max_tokens"]
        completions = self._client.completions
        if self._settings.chat:
            completions = self._client.chat.completions
        sent.set(request)
        request.started_ns = time.time_ns()
        started = time.perf_counter()
        try:
            async with completions.with_streaming_response.create(**body) as response:
                async for content in events(response):
                    self.last_event = time.perf_counter()
                    event = read_event(content)
                    note_event(request, event, self.last_event - started)
                    check_length(max(len(request.token_ids), len(request.shown_ids)), max_tokens)
                    if event.token_ids:
                        add(event.token_ids)
                    if request.may_be_left:
                        return
                    finished = finished or event.is_last
                    usage = usage if event.num_tokens is None else event.num_tokens
        finally:
            request.seconds = time.perf_counter() - started
        if not finished:
            raise RunError("the answer ended early")
        check_length(len(request.outcomes), max_tokens, "iterations")
        if usage is not None:
            check_usage(usage, len(request.token_ids), request.text, max_tokens)
            request.num_tokens = len(request.token_ids) or usage
            request.count_undrafted()

    def _set_tokens(self, request: RequestRecord) -> None:
        """Set the tokens of an answer without ids: those that llama.cpp shows, or its text's."""
        # The parser of a chat holds some back.
        is_complete = request.num_tokens > 0 and len(request.shown_ids) == request.num_tokens
        if is_complete and not self._settings.chat:
            request.token_ids = request.shown_ids
            return
        request.from_text = True
        request.token_ids = self._tokenizer.encode(request.text, add_special_tokens=False)

    def _count_unanswered(self, request: RequestRecord, failure: Exception | None) -> None:
        """Give the server up after too many requests in a row without a token or a refusal."""
        is_refused = hasattr(failure, "status_code") or isinstance(failure, HarnessError)
        if failure is None or request.arrivals or is_refused:
            self._num_unanswered = 0
            return
        self._num_unanswered += 1
        if self._num_unanswered > _MOST_UNANSWERED + self.num_in_flight:
            number = f"{self._num_unanswered} requests in a row had no answer"
            self.given_up = f"{number}, the last with {request.error}; no more are sent"

    def _explained(self, error: Exception) -> RequestError:
        """A failure in one short line, without the API key."""
        message = str(error)
        if closed_by_server(error):
            message = f"{self._client.base_url} closed the connection without an answer"
        elif is_about_connections(error):
            # The client says "Connection error." of all of them.
            cause = error.__cause__ or error
            message = (
                f"nothing answers at {self._client.base_url} ({cause}): is the server running?"
            )
        if self._settings.api_key_variable:
            message = message.replace(self._client.api_key, "***")
        code = getattr(error, "status_code", 0)
        return RequestError(code, type(error).__name__, from_outside(message).rstrip("."))


def arrival_times(question: Question, rate: float) -> list[float]:
    """The seconds at which the requests of a question are sent, at random (Poisson) times.

    They follow from the seed and the prompts, so that both arms are asked at the same times, and
    other prompts at others.

    Args:
        rate: requests per second on average.
    """
    drawn = random.Random(f"{question.seed} {question.indices[0]}")
    return list(itertools.accumulate(drawn.expovariate(rate) for _ in question.prompts))


class Background:
    """Requests that do not count, with which a load neither builds up nor drains.

    They take free places in `room`, or are sent at a rate. What is left of them is cancelled.

    Attributes:
        records: of those that were sent.
    """

    def __init__(
        self,
        sender: Sender,
        requests: Iterator[Outgoing],
        room: asyncio.Semaphore,
        rate: float | None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._sender = sender
        self._requests = requests
        self._room = room
        self._rate = rate
        self._has_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_arrived(self) -> int:
        return sum(len(request.arrivals) for request in self.records)

    async def lead(self) -> None:
        """Send requests until the first of them has ended."""
        leading = self.begin()
        await self._has_ended.wait()
        leading.cancel()

    def begin(self, wait_s: float = 0.0) -> asyncio.Task[None]:
        """Send requests from then on. Those that wait for room already come first."""
        task = asyncio.create_task(self._send_on(wait_s))
        self._tasks.append(task)
        return task

    async def _send_on(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._room.acquire()
        # A server that refuses them at once would be flooded.
        while not any(request.error for request in self.records):
            outgoing = next(self._requests)
            self.records.append(outgoing[1])
            self._tasks.append(asyncio.create_task(self._send(outgoing)))
            if self._rate:
                await asyncio.sleep(random.expovariate(self._rate))
            await self._room.acquire()

    async def _send(self, outgoing: Outgoing) -> None:
        try:
            await self._sender.send(*outgoing)
        finally:
            self._room.release()
            self._has_ended.set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def send_all(
    sender: Sender,
    requests: Sequence[Outgoing],
    end: Callable[[dict[str, Any], RequestRecord], None],
    num_in_flight: int,
    rate: float | None = None,
    times: Sequence[float] = (),
    extra: Iterator[Outgoing] | None = None,
    begin: Callable[[], None] = lambda: None,
) -> Load:
    """Send requests, wait until the last has ended, and return what was in flight meanwhile.

    Args:
        end: is called with each request that has ended.
        num_in_flight: the most that have not ended; without effect at a rate.
        rate: requests per second; None to send one wherever there is room.
        times: at a rate, the seconds after which each of `requests` is sent.
        extra: requests without end, which keep up the load: at a rate before and behind the
            others, else in the places of those that have ended, when no others wait.
        begin: is called before the first of `requests` is sent.
    """
    room = asyncio.Semaphore(sys.maxsize if rate else num_in_flight)
    background = Background(sender, extra or iter(()), room, rate)

    async def send_in_turn(place: int) -> None:
        if rate:
            await asyncio.sleep(times[place])
        body, request, add = requests[place]
        async with room:
            await sender.send(body, request, add)
        end(body, request)

    try:
        if rate and extra is not None:
            await background.lead()
        begin()
        started = time.perf_counter()
        before = sender.request_seconds()
        num_arrived_before = background.num_arrived
        asking = asyncio.gather(*(send_in_turn(place) for place in range(len(requests))))
        if extra is not None:
            background.begin(times[-1] + random.expovariate(rate) if rate else 0.0)
        await asking
        num_extra = background.num_arrived - num_arrived_before
        num_own = sum(len(request.arrivals) for _, request, _ in requests)
        return Load(
            request_seconds=sender.request_seconds() - before,
            seconds=time.perf_counter() - started,
            share=num_own / (num_own + num_extra) if num_own else 1.0,
            extra=background.records,
            offered_s=times[-1] if rate else 0.0,
        )
    finally:
        await background.stop()
