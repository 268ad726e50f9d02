"""HTTP with one server: its pages, the client for requests, why one has no answer, and the events of an answer."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from harness.config.errors import RunError, SettingError

if TYPE_CHECKING:
    import ssl

    import httpx2


# Of a page, from the first byte that is sent to the last that is read.
_PAGE_TIMEOUT_S = 5.0
# The most bytes of an error, of a page, an event or an answer without a stream, and of a whole answer, whose events may
# each have the log-probabilities of a vocabulary.
_MOST_OF_ERROR = 4_000_000
_MOST_OF_EVENT = 64_000_000
_MOST_OF_ANSWER = 2**30
# Variables of the environment that name a proxy, in small letters. No proxy is asked: its time would be measured.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# HTTP's statuses of a request whose key is missing or wrong.
KEY_REFUSED = (401, 403)
# HTTP's status of what is too large, and of a request that came to the wrong server.
_TOO_LARGE = 413
MISDIRECTED = 421

Result = TypeVar("Result")


class RequestFailed(RunError):
    """A request that was refused, or not answered.

    Attributes:
        code: HTTP's, 400 or more; 0 without an answer.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


@functools.cache
def _certificates(is_https: bool) -> ssl.SSLContext:
    """Whom a client trusts, read once in a process: it takes tens of milliseconds, also where no address has https.

    Args:
        is_https: whether the environment may name the certificates; an http address needs none.

    Raises:
        SettingError: the environment names certificates that cannot be read.
    """
    import httpx2

    try:
        return httpx2.create_ssl_context(trust_env=is_https)
    except OSError as error:
        # The error names the file of keys alone.
        variable = "SSLKEYLOGFILE" if error.filename else "SSL_CERT_FILE"
        rule = f"cannot be used: {error.strerror}"
        raise SettingError(variable, rule, os.environ.get(variable)) from error


def _client(url: str, key: str | None, timeout_s: float, **settings: Any) -> httpx2.AsyncClient:
    """A client that asks one server, with the key of its API if it has one. It does not follow that server to another
    one, which would be measured in its place, and which would get the prompts.
    """
    import httpx2

    home = httpx2.URL(url)
    headers = {"Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"

    async def check(request: httpx2.Request) -> None:
        there = request.url
        if (there.host, there.port) != (home.host, home.port):
            reason = f"{url} sends requests on to {there}, another server: name that one"
            raise RequestFailed(reason, MISDIRECTED)

    return httpx2.AsyncClient(
        headers=headers,
        timeout=timeout_s,
        verify=_certificates(home.scheme == "https"),
        follow_redirects=True,
        trust_env=False,
        event_hooks={"request": [check]},
        **settings,
    )


def new_client(url: str, key: str | None, timeout_s: float) -> httpx2.AsyncClient:
    """A client of one server, with as many connections as there are requests."""
    import httpx2

    return _client(
        url,
        key,
        timeout_s,
        base_url=url,
        # Without an expiry: a new connection would be in the times of the arm whose turns are further apart.
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=None
        ),
    )


def root_of(url: str) -> str:
    """The address of a server, from that of its API: without `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def page(url: str, key: str | None) -> str:
    """The body of a page of a server, on a connection of its own.

    Args:
        key: of the server's API.

    Raises:
        RequestFailed: nothing answers in time, what answers is malformed, or it is an error.
    """
    import httpx2

    async def read() -> str:
        async with (
            asyncio.timeout(_PAGE_TIMEOUT_S),
            _client(url, key, _PAGE_TIMEOUT_S) as client,
            client.stream("GET", url) as response,
        ):
            # Not decompressed: a few bytes would make gigabytes.
            data = await _joined(response.aiter_raw(), _MOST_OF_EVENT)
        if response.is_error:
            code = response.status_code
            raise RequestFailed(f"{code} {response.reason_phrase}".rstrip(), code)
        if len(data) == _MOST_OF_EVENT:
            # What is behind may be what a reader looks for.
            raise RequestFailed(f"it has more than {_MOST_OF_EVENT:,} bytes", _TOO_LARGE)
        return data.decode(errors="replace")

    try:
        return in_thread(read())
    except TimeoutError as error:
        raise RequestFailed(f"no end after {_PAGE_TIMEOUT_S:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise RequestFailed(str(error)) from error


def in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that runs in a thread: the caller's may have a loop, as a notebook's has. A signal ends
    the wait at once.
    """
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(coroutine))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()


@asynccontextmanager
async def answer_to(
    client: httpx2.AsyncClient,
    path: str,
    body: Mapping[str, Any],
) -> AsyncIterator[httpx2.Response]:
    """The answer to a request, whose body is yet to be read. All of it, from sending to the last byte, must take no
    longer than the client's timeout.

    A connection that was kept alive may be closed by the server just as the request is sent: then it is sent again, at
    last on a new one. A server that died of a request on a new connection does not get it twice.

    Args:
        path: of the API, `completions`.

    Raises:
        RequestFailed: there is no answer, or it is an error.
        TimeoutError: it has not ended in time.
    """
    async with asyncio.timeout(client.timeout.read):
        response = await _begun(client, path, body)
        try:
            if response.is_error:
                text = (await body_of(response, _MOST_OF_ERROR)).decode(errors="replace")
                code = response.status_code
                raise RequestFailed(f"{code} {response.reason_phrase}: {text}", code)
            yield response
        finally:
            await response.aclose()


async def _begun(client: httpx2.AsyncClient, path: str, body: Mapping[str, Any]) -> httpx2.Response:
    """The head of an answer. Raises RequestFailed where there is none."""
    import httpx2

    is_new_connection = False

    async def note_connection(event: str, _: object) -> None:
        nonlocal is_new_connection
        if event == "connection.connect_tcp.started":
            is_new_connection = True

    watched = {"trace": note_connection}
    message = client.build_request("POST", path, json=body, extensions=watched)
    closed = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
    while True:
        try:
            return await client.send(message, stream=True)
        except closed as error:
            # Each attempt uses up a connection that was kept alive, and all of them may be closed by now.
            if is_new_connection:
                reason = (
                    f"{client.base_url} closed the connection without an answer of HTTP: {error}"
                )
                raise RequestFailed(reason) from error
        except httpx2.TransportError as error:
            raise RequestFailed(_why_unanswered(str(client.base_url), error)) from error


def _why_unanswered(url: str, error: Exception) -> str:
    """Why there is no connection, with what in the environment may be the reason."""
    cause = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        cause += "; SSL_CERT_FILE=FILE names a certificate to trust"
    reason = f"nothing answers at {url} ({cause}): is the server running?"
    proxies = [name for name in os.environ if name.lower() in _PROXIES]
    if proxies:
        reason += f" The proxy of {proxies[0]} is not asked: a server behind it needs a tunnel"
    return reason


async def body_of(response: httpx2.Response, most: int = _MOST_OF_EVENT) -> bytes:
    """An answer's body, without what is beyond `most` bytes."""
    return await _joined(response.aiter_bytes(), most)


async def _joined(parts: AsyncIterator[bytes], most: int) -> bytes:
    data = bytearray()
    async for part in parts:
        data += part
        if len(data) >= most:
            break
    return bytes(data[:most])


async def events(response: httpx2.Response) -> AsyncGenerator[Any]:
    """The JSON of each server-sent event, such as `data: {"choices": ...}`; of an answer without a stream the whole.

    Raises:
        RunError: the answer or one of its events is too long.
        JSONDecodeError: an event is no JSON.
    """
    import httpx2

    parts = response.aiter_bytes()
    beginning = b""
    async for part in parts:
        beginning = (beginning + part).lstrip()
        if beginning:
            break
    if beginning.startswith(b"{"):
        body = beginning + await _joined(parts, _MOST_OF_EVENT)
        if len(body) > _MOST_OF_EVENT:
            raise RunError(f"the answer has more than {_MOST_OF_EVENT:,} bytes")
        yield json.loads(body)
        return

    async def whole() -> AsyncIterator[bytes]:
        num_bytes = len(beginning)
        yield beginning
        async for part in parts:
            num_bytes += len(part)
            if num_bytes > _MOST_OF_ANSWER:
                raise RunError(f"the answer has more than {_MOST_OF_ANSWER:,} bytes")
            yield part
        # The last event may lack its end.
        yield b"\n\n"

    # With the type that EventSource takes, whatever the server calls its stream.
    stream = httpx2.Response(
        200,
        headers={"content-type": "text/event-stream"},
        content=whole(),
        request=response.request,
    )
    try:
        async for event in httpx2.EventSource(stream, _MOST_OF_EVENT):
            if event.data and not event.data.startswith("[DONE]"):
                yield json.loads(event.data)
    except httpx2.SSEError as error:
        raise RunError(str(error)) from error
