"""Sends requests to one server, and reads the answers into records.

`Sender` handles everything that can happen to a request: it is answered, refused or cut off, it times out, or it is not
sent because the server does not respond any more. `send_in_turn` decides when each of many requests is sent, and sends
further requests that keep up the load.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.config.errors import HarnessError, RunError, from_outside
from harness.engines.arrivals import Arrival, Origin
from harness.engines.requests import CANCELLED, TIMED_OUT, Load, RequestError, RequestRecord
from harness.engines.tokenizer import TextTokenizer, Tokenizer
from harness.servers.events import (
    REPORTS,
    check_length,
    check_single,
    note_event,
    note_reports,
    read_event,
    settle,
)
from harness.servers.http import RequestFailed, answer_to, events

if TYPE_CHECKING:
    import httpx2

    from harness.servers.settings import ServerSettings

# No more requests are sent after more than this many in a row got no answer, in addition to as many as are in flight:
# each of them may take `engine.timeout_s`.
_MOST_UNANSWERED = 4
# The most characters of a line that is not JSON in a message.
_LONGEST_LINE = 60


@dataclass(frozen=True)
class Outgoing:
    """A request that is to be sent.

    Attributes:
        body: the body of the request, for OpenAI's API.
        request: the record of the request.
        row: its place among the requests of a question.
        arrivals: a list for the arrivals of all requests of the question; tokens that arrive as ids are added to it.
        may_be_empty: whether an answer without a token is accepted; otherwise it is a failure.
    """

    body: dict[str, Any]
    request: RequestRecord
    row: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    may_be_empty: bool = True


class Sender:
    """Sends requests to one server, until too many requests in a row got no answer.

    Args:
        client: HTTP client of the server's API.
        tokenizer: tokenizer of the served model.
        settings: settings of `engine=server`.
        counts_within: as in `Dialect`.

    Attributes:
        given_up: the reason why no more requests are sent; None while requests are sent.
        num_in_flight: number of requests that were sent and have not ended.
        last_event: time of the last event from the server, on the clock `time.perf_counter`.
    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        counts_within: bool = False,
    ) -> None:
        self._client = client
        self._counts_within = counts_within
        self._tokenizer = tokenizer
        self._settings = settings
        self._num_unanswered = 0
        self.given_up: str | None = None
        self.num_in_flight = 0
        self.last_event = 0.0

    async def send(self, outgoing: Outgoing) -> None:
        """Send one request, and record the answer or the failure in its record. Only a cancellation is raised."""
        request = outgoing.request
        if self.given_up is not None:
            request.error = RequestError(0, self.given_up)
            return
        timeout_s = self._settings.timeout_s
        # A refusal also counts as an answer.
        was_answered = True
        self.num_in_flight += 1
        try:
            await self._read(outgoing)
        # Raised by `answer_to`, which limits a whole answer to the client's timeout.
        except TimeoutError:
            was_answered = False
            request.error = RequestError(TIMED_OUT, f"Timeout: no end after {timeout_s:g} s")
        except asyncio.CancelledError:
            request.error = RequestError(CANCELLED, "Cancelled before the answer ended")
            # Set here, because `settle` is not reached.
            num_shown = max(len(request.token_ids), len(request.shown_ids))
            request.num_tokens = max(num_shown, len(request.arrivals))
            raise
        except Exception as error:
            code = 0
            # An error about the contents of an answer is an answer; a RequestFailed without a code is not.
            was_answered = isinstance(error, HarnessError | json.JSONDecodeError)
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
            self.num_in_flight -= 1
        if was_answered or request.arrivals:
            self._num_unanswered = 0
        else:
            self._num_unanswered += 1
        if self._num_unanswered > _MOST_UNANSWERED + self.num_in_flight:
            number = f"{self._num_unanswered} requests in a row got no answer"
            self.given_up = f"{number}, the last with {request.error}; no more are sent"
        settle(request, self._tokenizer, self._settings.chat, outgoing.may_be_empty)

    async def _read(self, outgoing: Outgoing) -> None:
        """Send a request and read its answer to the end. If the request is to be left midway
        (`RequestRecord.leave_after`), reading stops once enough tokens have arrived, and the server's counts are not
        read.

        Raises:
            HarnessError: if the server refuses, breaks off, or sends something that cannot be true.
            TimeoutError: if the answer has not ended in time.
            Exception: any error that a damaged event causes.
        """
        body, request = outgoing.body, outgoing.request
        finished = False
        reports: dict[str, Any] = {}
        max_tokens = body["max_tokens"]
        path = "chat/completions" if self._settings.chat is True else "completions"
        started = time.perf_counter()
        try:
            async with (
                answer_to(self._client, path, body) as response,
                aclosing(events(response)) as contents,
            ):
                async for content in contents:
                    self.last_event = time.perf_counter()
                    event = read_event(content)
                    check_single(event)
                    note_event(request, event, self.last_event - started)
                    check_length(request, max_tokens)
                    tokens = event.token_ids
                    # Without a real tokenizer, `settle` replaces these ids, so they are not recorded here.
                    if tokens and not isinstance(self._tokenizer, TextTokenizer):
                        origins = [Origin.TARGET] * len(tokens)
                        arrived = Arrival(outgoing.row, request.arrivals[-1], tokens, origins)
                        outgoing.arrivals.append(arrived)
                    if request.has_enough:
                        return
                    finished = finished or event.is_last
                    for name in REPORTS:
                        if content.get(name) is not None:
                            reports[name] = content[name]
        finally:
            request.seconds = time.perf_counter() - started
        if not finished:
            raise RunError("the answer ended without a finish_reason")
        note_reports(request, reports, max_tokens, self._counts_within)


async def send_in_turn(
    sender: Sender,
    requests: Sequence[Outgoing],
    further: Iterator[Outgoing],
    num_in_flight: int,
    slots: float,
) -> Load:
    """Send requests, with at most `num_in_flight` in flight at the same time. Once all of them are sent, a request of
    `further` is sent whenever a request ends, so that the load stays the same; these do not count. Returns the load
    when all of `requests` have ended; further requests that are still in flight are cancelled.

    A failed request of `further` ends these, because a server that refuses requests immediately would be flooded.

    Args:
        further: an endless supply of further requests, or an iterator without any.
        slots: how many requests the server answers at the same time, in the order in which they are sent.
    """
    room = asyncio.Semaphore(num_in_flight)
    tasks: list[asyncio.Task[None]] = []
    extra: list[RequestRecord] = []
    # When each request was sent, and when it ended, in the order in which they are sent.
    periods: list[list[float]] = []

    async def send(outgoing: Outgoing) -> None:
        period = [time.perf_counter(), math.inf]
        periods.append(period)
        try:
            await sender.send(outgoing)
        finally:
            period[1] = time.perf_counter()
            room.release()

    async def begin(outgoing: Outgoing) -> asyncio.Task[None]:
        await room.acquire()
        task = asyncio.create_task(send(outgoing))
        tasks.append(task)
        return task

    async def begin_further() -> None:
        for outgoing in further:
            await begin(outgoing)
            extra.append(outgoing.request)
            if any(record.error for record in extra):
                break

    try:
        own = [await begin(outgoing) for outgoing in requests]
        tasks.append(asyncio.create_task(begin_further()))
        await asyncio.gather(*own)
        ended = time.perf_counter()
        periods = [[began, min(end, ended)] for began, end in periods]
        # Own requests are sent first, so a further request never takes a slot for which one of them waits.
        own_seconds = seconds_in_slots(periods[: len(requests)], slots)
        all_seconds = seconds_in_slots(periods, slots)
        return Load(
            request_seconds=sum(end - began for began, end in periods),
            seconds=ended - periods[0][0],
            # Further requests slow the others down, so only this share of the time is due to the others.
            share=own_seconds / all_seconds if all_seconds else 1.0,
            extra=extra,
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def seconds_in_slots(periods: Sequence[Sequence[float]], slots: float) -> float:
    """The time that requests spent in slots, in seconds, added up over all requests.

    For example, three requests are in flight for 2 s. With two slots, one of them waits, and the time is 4 s.

    Args:
        periods: of each request, when it was sent and when it ended.
        slots: number of requests that are in a slot at the same time; the others wait.
    """
    changes = sorted([(began, 1) for began, _ in periods] + [(ended, -1) for _, ended in periods])
    seconds = 0.0
    number = 0
    for (moment, change), (following, _) in itertools.pairwise(changes):
        number += change
        seconds += min(number, slots) * (following - moment)
    return seconds
