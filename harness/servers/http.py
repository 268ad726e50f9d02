"""HTTP with one server: its pages, the client for requests, why one has no answer, and the events of an answer."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from harness.config.errors import RunError

if TYPE_CHECKING:
    import ssl

    import httpx2


# Of a page, whose timeout is that of each read.
_PAGE_TIMEOUT_S = 5.0
# The most that is read of a page, an error's too, and that a line of an answer may have.
_MOST_OF_PAGE = 4_000_000
_MOST_OF_ANSWER = 64_000_000
# Addresses of this machine, which no proxy is asked for.
_HERE = re.compile(r"https?://(127\.[\d.]+|0\.0\.0\.0|localhost|\[::1\])(:|/|$)", re.IGNORECASE)
# HTTP's statuses of a request whose key is missing or wrong.
KEY_REFUSED = (401, 403)
# HTTP's status of a request that came to the wrong server.
_MISDIRECTED = 421


class RequestFailed(RunError):
    """A request that was refused, or not answered.

    Attributes:
        code: HTTP's, 400 or more; 0 without an answer.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Whom a client trusts, read once in a process: it takes tens of milliseconds, also where no address has https."""
    import httpx2

    return httpx2.create_ssl_context()


def client_settings(url: str, key: str | None, timeout_s: float) -> dict[str, Any]:
    """How a client asks one server, with the key of its API if it has one."""
    return {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": timeout_s,
        "verify": _certificates(),
        "follow_redirects": True,
        "trust_env": not _HERE.match(url),
    }


def new_client(url: str, key: str | None, timeout_s: float) -> httpx2.AsyncClient:
    """A client of one server, with as many connections as there are requests. It does not follow that server to another
    one, whose times would be measured, and which would get the prompts.
    """
    import httpx2

    home = httpx2.URL(url)

    async def check(request: httpx2.Request) -> None:
        there = request.url
        if (there.host, there.port) != (home.host, home.port):
            reason = f"{url} sends requests on to {there}, another server: name that one"
            raise RequestFailed(reason, _MISDIRECTED)

    return httpx2.AsyncClient(
        base_url=url,
        # Without an expiry: a new connection would be in the times of the arm whose turns are further apart.
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=None
        ),
        event_hooks={"request": [check]},
        **client_settings(url, key, timeout_s),
    )


def root_of(url: str) -> str:
    """The address of a server, whose API has this one: without `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def page(url: str, key: str | None) -> str:
    """The body of a page of a server, on a connection of its own.

    Args:
        key: of the server's API. It is not sent on where another server is pointed to.

    Raises:
        RequestFailed: nothing answers, what answers is malformed, or it is an error.
    """
    import httpx2

    data = bytearray()
    try:
        client = httpx2.Client(**client_settings(url, key, _PAGE_TIMEOUT_S))
        with client, client.stream("GET", url) as response:
            for part in response.iter_bytes():
                data += part
                if len(data) >= _MOST_OF_PAGE:
                    break
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise RequestFailed(str(error)) from error
    if response.is_error:
        code = response.status_code
        raise RequestFailed(f"{code} {response.reason_phrase}".rstrip(), code)
    return data.decode(errors="replace")


@asynccontextmanager
async def answer_to(
    client: httpx2.AsyncClient,
    path: str,
    body: Mapping[str, Any],
) -> AsyncIterator[httpx2.Response]:
    """The answer to a request, whose body has not been read.

    A connection that was kept alive may be closed by the server just as the request is sent: then it is sent again, at
    last on a new one. A server that died of a request on a new connection does not get it twice.

    Args:
        path: of the API, `completions`.

    Raises:
        RequestFailed: there is no answer, or it is an error.
    """
    import httpx2

    is_new_connection = False

    async def note_connection(event: str, _: object) -> None:
        nonlocal is_new_connection
        if event == "connection.connect_tcp.started":
            is_new_connection = True

    watched = {"trace": note_connection}
    message = client.build_request("POST", path, json=body, extensions=watched)
    closed = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
    response: httpx2.Response | None = None
    while response is None:
        try:
            response = await client.send(message, stream=True)
        except closed as error:
            # Each attempt uses up a connection that was kept alive, and all of them may be closed by now.
            if is_new_connection:
                reason = (
                    f"{client.base_url} closed the connection without an answer of HTTP: {error}"
                )
                raise RequestFailed(reason) from error
        except httpx2.TransportError as error:
            raise RequestFailed(_why_unanswered(str(client.base_url), error)) from error
    try:
        if response.is_error:
            text = (await body_of(response, _MOST_OF_PAGE)).decode(errors="replace")
            code = response.status_code
            raise RequestFailed(f"{code} {response.reason_phrase}: {text}", code)
        yield response
    finally:
        await response.aclose()


def _why_unanswered(url: str, error: Exception) -> str:
    """Why there is no connection, with what in the environment may be the reason."""
    cause = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        cause += "; SSL_CERT_FILE=FILE names a certificate to trust"
    for variable in os.environ:
        if not _HERE.match(url) and variable.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            cause += f"; {variable} is set"
    return f"nothing answers at {url} ({cause}): is the server running?"


async def body_of(response: httpx2.Response, most: int = _MOST_OF_ANSWER) -> bytes:
    """An answer's body, without what is beyond `most` bytes."""
    data = bytearray()
    async for part in response.aiter_bytes():
        data += part
        if len(data) >= most:
            break
    return bytes(data)


async def events(response: httpx2.Response) -> AsyncIterator[Any]:
    """The JSON of each server-sent event, a line such as `data: {"choices": ...}`; of an answer
    without a stream the whole.

    Raises:
        RunError: a line has no end.
    """
    line = bytearray()
    others = bytearray()
    async for data in response.aiter_bytes():
        *ends, rest = data.split(b"\n")
        for end in ends:
            line += end
            if not line.startswith(b"data:"):
                others += line
            elif b"[DONE]" not in line[:16]:
                yield json.loads(line[5:])
            line.clear()
        line += rest
        if len(line) + len(others) > _MOST_OF_ANSWER:
            raise RunError(f"a line of the answer has more than {_MOST_OF_ANSWER:,} bytes")
    # Over several lines where a server indents it, or with a line end behind it.
    whole = (others + line).lstrip()
    if whole.startswith(b"{"):
        yield json.loads(whole)
