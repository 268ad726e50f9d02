"""HTTP with one server: its pages, the client for requests, reasons for failures, and the events of an answer."""

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


# How long a page may take, from the first byte sent to the last byte read.
_PAGE_TIMEOUT_S = 5.0
# The most bytes of an error; of a page, an event or an answer without a stream; and of a whole answer, whose events may
# each hold the log-probabilities of a whole vocabulary.
_MOST_OF_ERROR = 4_000_000
_MOST_OF_EVENT = 64_000_000
_MOST_OF_ANSWER = 2**30
# Environment variables that name a proxy, in lower case. Proxies are not used, because their time would be measured.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# HTTP's statuses for a request whose key is missing or wrong.
KEY_REFUSED = (401, 403)
# HTTP's statuses for content that is too large, and for a request that came to the wrong server.
_TOO_LARGE = 413
MISDIRECTED = 421

Result = TypeVar("Result")


class RequestFailed(RunError):
    """A request that was refused or not answered.

    Attributes:
        code: HTTP's status, 400 or more; 0 without an answer.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


@functools.cache
def _certificates(is_https: bool) -> ssl.SSLContext:
    """The certificates that clients trust. They are read once per process, because that takes tens of milliseconds,
    even if no address uses https.

    Args:
        is_https: whether the environment may name the certificates; http addresses need none.

    Raises:
        SettingError: if the environment names certificates that cannot be read.
    """
    import httpx2

    try:
        return httpx2.create_ssl_context(trust_env=is_https)
    except OSError as error:
        # The error has a file name only if the file is the one for TLS keys.
        variable = "SSLKEYLOGFILE" if error.filename else "SSL_CERT_FILE"
        rule = f"cannot be used: {error.strerror}"
        raise SettingError(variable, rule, os.environ.get(variable)) from error


def _client(url: str, key: str | None, timeout_s: float, **settings: Any) -> httpx2.AsyncClient:
    """A client for one server, which sends the key of its API if it has one.

    It does not follow redirects to other servers, which would be measured in its place and would get the prompts.
    """
    import httpx2

    home = httpx2.URL(url)
    headers = {"Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"

    async def check(request: httpx2.Request) -> None:
        there = request.url
        if (there.host, there.port) != (home.host, home.port):
            reason = f"{url} redirects to {there}, another server: use that address"
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
    """A client for requests to one server, with as many connections as there are requests."""
    import httpx2

    return _client(
        url,
        key,
        timeout_s,
        base_url=url,
        # Connections never expire. A new one would add to the times of the arm whose turns are further apart.
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=None
        ),
    )


def root_of(url: str) -> str:
    """The address of a server, from the address of its API: without `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def page(url: str, key: str | None) -> str:
    """The body of a server's page, read on a new connection.

    Args:
        key: key of the server's API; None without one.

    Raises:
        RequestFailed: if nothing answers in time, the answer is malformed or too long, or it is an error.
    """
    import httpx2

    async def read() -> str:
        async with (
            asyncio.timeout(_PAGE_TIMEOUT_S),
            _client(url, key, _PAGE_TIMEOUT_S) as client,
            client.stream("GET", url) as response,
        ):
            # Not decompressed, because a few bytes could become gigabytes.
            data = await _joined(response.aiter_raw(), _MOST_OF_EVENT)
        if response.is_error:
            code = response.status_code
            raise RequestFailed(f"{code} {response.reason_phrase}".rstrip(), code)
        if len(data) == _MOST_OF_EVENT:
            # The rest may have what a reader looks for.
            raise RequestFailed(f"it has more than {_MOST_OF_EVENT:,} bytes", _TOO_LARGE)
        return data.decode(errors="replace")

    try:
        return in_thread(read())
    except TimeoutError as error:
        raise RequestFailed(f"no end after {_PAGE_TIMEOUT_S:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise RequestFailed(str(error)) from error


def in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that runs in a thread of its own, because the caller's thread may have a running loop,
    as in a notebook. A signal ends the wait at once.
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
    """A context with the answer to a request, whose body is yet to be read. From sending to the last byte, it must not
    take longer than the client's timeout.

    If the server closes a connection that was kept alive just as the request is sent, it is sent again, and finally on
    a new connection. A request on a new connection is not repeated, because the server may have died of it.

    Args:
        path: path below the API's address, such as `completions`.

    Raises:
        RequestFailed: if there is no answer, or it is an error.
        TimeoutError: if it has not ended in time.
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
    """The head of an answer.

    Raises:
        RequestFailed: if there is no answer.
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
    while True:
        try:
            return await client.send(message, stream=True)
        except closed as error:
            # Each attempt uses up one connection that was kept alive, and all of these may be closed by now.
            if is_new_connection:
                reason = (
                    f"{client.base_url} closed the connection without an answer of HTTP: {error}"
                )
                raise RequestFailed(reason) from error
        except httpx2.TransportError as error:
            raise RequestFailed(_why_unanswered(str(client.base_url), error)) from error


def _why_unanswered(url: str, error: Exception) -> str:
    """Why there is no connection, with anything in the environment that may be the reason."""
    cause = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        cause += "; SSL_CERT_FILE=FILE names a certificate to trust"
    reason = f"nothing answers at {url} ({cause}): is the server running?"
    proxies = [name for name in os.environ if name.lower() in _PROXIES]
    if proxies:
        reason += (
            f" Proxies ({proxies[0]}) are not used: reach a server behind one through a tunnel"
        )
    return reason


async def body_of(response: httpx2.Response, most: int = _MOST_OF_EVENT) -> bytes:
    """An answer's body, cut after `most` bytes."""
    return await _joined(response.aiter_bytes(), most)


async def _joined(parts: AsyncIterator[bytes], most: int) -> bytes:
    data = bytearray()
    async for part in parts:
        data += part
        if len(data) >= most:
            break
    return bytes(data[:most])


async def events(response: httpx2.Response) -> AsyncGenerator[Any]:
    """The JSON of each server-sent event, such as `data: {"choices": ...}`. An answer without a stream is one event.

    Raises:
        RunError: if the answer, or one of its events, is too long.
        JSONDecodeError: if an event is not JSON.
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
        # The last event may lack the empty line that ends it.
        yield b"\n\n"

    # In a response with the type that EventSource accepts, whatever type the server gives its stream.
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
