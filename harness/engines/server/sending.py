"""Sends requests to one server, and reads their answers into records.

`server` decides when a request is sent; here is what can happen to it: it is answered, refused, cut
off, times out, is sent again once, or is not sent because the server is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from harness.config.errors import HarnessError, RunError, from_outside
from harness.engines.requests import RequestError, RequestRecord
from harness.engines.server.chunks import check_length, check_usage, joined_surrogates, read_chunk
from harness.engines.server.connection import closed_by_server, events, is_about_connections, sent

# Requests without an answer in a row, beyond those that are in flight together, after which no more
# are sent: each may take `engine.timeout_s`.
_MOST_UNANSWERED = 4


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
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._read_or_read_again(body, request, add)
        except TimeoutError as error:
            failure = error
            request.error = RequestError(408, "Timeout", f"no end after {timeout_s:g} s")
        except asyncio.CancelledError:
            request.error = RequestError(499, "Cancelled", "not read to its end")
            raise
        except Exception as error:
            failure = error
            request.error = self._explained(error)
        finally:
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
                async for event in events(response):
                    self.last_event = time.perf_counter()
                    chunk = read_chunk(event)
                    request.note(chunk, self.last_event - started)
                    check_length(max(len(request.token_ids), len(request.shown_ids)), max_tokens)
                    if chunk.token_ids:
                        add(chunk.token_ids)
                    if request.may_be_left:
                        return
                    finished = finished or chunk.finished
                    usage = usage if chunk.usage is None else chunk.usage
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
