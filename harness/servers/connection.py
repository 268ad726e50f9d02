"""HTTP with one server: its pages, the client for requests, why one has no answer, and the events of an answer."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from harness.config.errors import RunError

if TYPE_CHECKING:
    import ssl

    import httpx2


# Of a page, whose timeout is that of each read.
_PAGE_TIMEOUT_S = 5.0
_MOST_BYTES = 4_000_000


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


def authorization(key: str | None) -> dict[str, str]:
    """The headers by which a server knows the key of its API; none without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def new_client(url: str, key: str | None, timeout_s: float) -> httpx2.AsyncClient:
    """A client of one server, with as many connections as there are requests."""
    import httpx2

    return httpx2.AsyncClient(
        base_url=url,
        headers=authorization(key),
        timeout=timeout_s,
        verify=_certificates(),
        # Without an expiry: a new connection would be in the times of the arm whose turns are further apart.
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=None
        ),
        follow_redirects=True,
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

    client = httpx2.Client(
        headers=authorization(key),
        timeout=_PAGE_TIMEOUT_S,
        verify=_certificates(),
        follow_redirects=True,
    )
    data = b""
    try:
        with client, client.stream("GET", url) as response:
            for part in response.iter_bytes():
                data += part
                if len(data) >= _MOST_BYTES:
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
            cause = str(error) or type(error).__name__
            reason = f"nothing answers at {client.base_url} ({cause}): is the server running?"
            raise RequestFailed(reason) from error
    try:
        if response.is_error:
            await response.aread()
            code = response.status_code
            raise RequestFailed(f"{code} {response.reason_phrase}: {response.text}", code)
        yield response
    finally:
        await response.aclose()


async def events(response: httpx2.Response) -> AsyncIterator[Any]:
    """The JSON of each server-sent event, a line such as `data: {"choices": ...}`; of an answer
    without a stream the whole.
    """
    rest = b""
    others = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                others += line
            elif b"[DONE]" not in line[:16]:
                yield json.loads(line[5:])
    # Over several lines where a server indents it, or with a line end behind it.
    whole = (others + rest).lstrip()
    if whole.startswith(b"{"):
        yield json.loads(whole)
