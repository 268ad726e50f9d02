"""The connection of `engine=server`: OpenAI's client, its errors, and the events of an answer."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from harness.config.errors import SettingError
from harness.engines.requests import RequestRecord

# The record of the request that the current asyncio task sends, to which the HTTP library's hooks add.
request_being_sent: ContextVar[RequestRecord] = ContextVar("request_being_sent")


def new_client(url: str, key: str | None, timeout_s: float) -> Any:
    """A client of one server. A failed request is a result: it is counted, not repeated."""
    import openai

    hooks: Any = {"request": [_note_new_connection]}
    http_client = openai.DefaultAsyncHttpxClient(base_url=url, event_hooks=hooks)
    return openai.AsyncOpenAI(
        base_url=url,
        api_key=key or "none",  # the client needs a key, also for servers without one
        timeout=timeout_s,
        max_retries=0,
        http_client=http_client,
    )


def api_key(setting: str, variable: str | None) -> str | None:
    """The key in the environment variable that a setting names; None where it names none.

    Raises:
        SettingError: there is no such variable.
    """
    key = os.environ.get(variable) if variable else None
    if variable and not key:
        raise SettingError(setting, "must name a variable of the environment", variable)
    return key


async def _note_new_connection(message: Any) -> None:
    """Have the HTTP library note in the request's record that it opens a connection."""
    request = request_being_sent.get(None)
    if request is None:  # a question about the server itself
        return
    request.on_new_connection = False

    async def note(event: str, _: object) -> None:
        if event == "connection.connect_tcp.started":
            request.on_new_connection = True

    message.extensions = {**message.extensions, "trace": note}


def is_about_connections(error: Exception) -> bool:
    """Whether no answer came, because a connection could not be made or ended."""
    import openai

    return isinstance(error, openai.APIConnectionError)


def closed_by_server(error: Exception) -> bool:
    """Whether a connection ended before any answer: a kept-alive one that the server had closed."""
    # By name: which library has these depends on the version of the client.
    cause = type(error.__cause__).__name__
    closed = cause in ("RemoteProtocolError", "ReadError", "WriteError")
    return is_about_connections(error) and closed


async def events(response: Any) -> AsyncIterator[Any]:
    """The JSON of each server-sent event, a line such as `data: {"choices": ...}`; of an answer
    without a stream the whole.

    The client's own reader takes ten times as long, and drops the fields that it does not know.
    """
    rest = b""
    async for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and b"[DONE]" not in line[:16]:
                yield json.loads(line[5:])
    if rest.startswith(b"{"):
        yield json.loads(rest)
