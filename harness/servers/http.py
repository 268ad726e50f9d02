"""HTTP with one server: reads its pages, makes the client for requests, explains failures, and reads the events of
answers.
"""

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


# Time limit for reading a page, from the first byte sent to the last byte read.
_PAGE_TIMEOUT_S = 5.0
# The most time for opening a connection. For example, a server without TLS waits for the end of a request when TLS
# begins.
_CONNECTION_TIMEOUT_S = 30.0
# The most bytes of an error; of a page, an event or an answer that is not streamed; and of a whole streamed answer,
# each of whose events may contain the log-probabilities of a whole vocabulary.
_MOST_OF_ERROR = 4_000_000
_MOST_OF_EVENT = 64_000_000
_MOST_OF_ANSWER = 2**30
# Environment variables that name a proxy, in lower case. Proxies are not used, because their delay would be measured.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# The HTTP statuses for a request whose key is missing or wrong.
KEY_REFUSED = (401, 403)
# The HTTP statuses for content that is too large, and for a request that was sent to the wrong server.
_TOO_LARGE = 413
MISDIRECTED = 421

Result = TypeVar("Result")


class RequestFailed(RunError):
    """A request that was refused or not answered.

    Attributes:
        code: the HTTP status, 400 or more; 0 without an answer.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


@functools.cache
def _certificates(is_https: bool) -> ssl.SSLContext:
    """The certificates that clients trust. They are read once for https and once for http, because this takes tens of
    milliseconds.

    Args:
        is_https: whether environment variables may name the certificates; http addresses need no certificates.

    Raises:
        SettingError: if the environment names certificates that cannot be read.
    """
    import httpx2

    try:
        return httpx2.create_ssl_context(trust_env=is_https)
    except OSError as error:
        # The error contains a file name only if the file for TLS keys cannot be opened.
        variable = "SSLKEYLOGFILE" if error.filename else "SSL_CERT_FILE"
        rule = f"cannot be used: {error.strerror}"
        raise SettingError(variable, rule, os.environ.get(variable)) from error


def _client(url: str, key: str | None, timeout_s: float, **settings: Any) -> httpx2.AsyncClient:
    """A client for one server, which sends the API key if there is one.

    It does not follow redirects to other servers, because they would be measured in place of this server, and would get
    the prompts.
    """
    import httpx2

    home = httpx2.URL(url)
    headers = {"Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"

    async def check(request: httpx2.Request) -> None:
        there = request.url
        if (there.scheme, there.host, there.port) != (home.scheme, home.host, home.port):
            reason = f"{url} redirects to {there}, another server: use that address"
            raise RequestFailed(reason, MISDIRECTED)

    return httpx2.AsyncClient(
        headers=headers,
        timeout=httpx2.Timeout(timeout_s, connect=_CONNECTION_TIMEOUT_S),
        verify=_certificates(home.scheme == "https"),
        follow_redirects=True,
        trust_env=False,
        event_hooks={"request": [check]},
        **settings,
    )


def new_client(url: str, key: str | None, timeout_s: float) -> httpx2.AsyncClient:
    """A client for requests to one server, which opens as many connections as there are requests in flight.

    Raises:
        SettingError: as `page` does.
    """
    import httpx2

    return _client(
        url,
        key,
        timeout_s,
        base_url=url,
        # Connections never expire. Opening a new one would add to the times of the arm that waits longer between its
        # questions.
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=None
        ),
    )


def root_of(url: str) -> str:
    """The address of a server, from the address of its API: without `/v1` at the end."""
    return url.rstrip("/").removesuffix("/v1")


def page(url: str, key: str | None) -> str:
    """The body of a server's page, read on a new connection.

    Args:
        key: key of the server's API; None without one.

    Raises:
        RequestFailed: if nothing answers in time, or if the answer is malformed, too long, an error, or a redirect to
            another server (`MISDIRECTED`).
        SettingError: for an https address, if a file that `SSL_CERT_FILE` or `SSLKEYLOGFILE` names cannot be used.
    """
    import httpx2

    async def read() -> str:
        async with (
            asyncio.timeout(_PAGE_TIMEOUT_S),
            _client(url, key, _PAGE_TIMEOUT_S) as client,
            client.stream("GET", url) as response,
        ):
            # The body is not decompressed, because a few bytes could become gigabytes.
            data = await _joined(response.aiter_raw(), _MOST_OF_EVENT)
        if response.is_error:
            code = response.status_code
            raise RequestFailed(f"{code} {response.reason_phrase}".rstrip(), code)
        if len(data) == _MOST_OF_EVENT:
            # The page is cut off here, and the rest may contain the entries that the caller needs.
            raise RequestFailed(f"it has more than {_MOST_OF_EVENT:,} bytes", _TOO_LARGE)
        return data.decode(errors="replace")

    try:
        return in_thread(read())
    except TimeoutError as error:
        raise RequestFailed(f"no end after {_PAGE_TIMEOUT_S:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise RequestFailed(str(error)) from error


def in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a thread of its own, and return its result.

    The caller's thread may already be running an event loop, as in a notebook. A signal such as Ctrl-C ends the wait
    immediately.
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
    """Send a request, and yield the answer, whose body is not read yet.

    The time from sending to the last byte is limited by the client's timeout. If the server closes a kept-alive
    connection just as the request is sent, the request is sent again, at last on a new connection. A request on a new
    connection is not repeated, because it may have crashed the server.

    Args:
        path: path below the API's address, such as `completions`.

    Raises:
        RequestFailed: if there is no answer, or if the answer is an error or a redirect to another server.
        httpx2.RequestError: if redirects have no end, or if the connection breaks within the answer.
        TimeoutError: if the answer has not ended in time.
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
    """Send a request, and return the answer once its head has arrived.

    Raises:
        RequestFailed: if there is no answer, or a redirect to another server.
        httpx2.TooManyRedirects: if redirects have no end.
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
        # First, because these errors are TransportErrors, too.
        except closed as error:
            # Each attempt uses one kept-alive connection, and the server may have closed all of these. So attempts end
            # with the first new connection.
            if is_new_connection:
                reason = (
                    f"{client.base_url} closed the connection without an answer of HTTP: {error}"
                )
                raise RequestFailed(reason) from error
        except httpx2.TransportError as error:
            raise RequestFailed(_why_unanswered(str(client.base_url), error)) from error


def _why_unanswered(url: str, error: Exception) -> str:
    """The reason why there is no connection, with hints about the address and the environment."""
    cause = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        cause += "; SSL_CERT_FILE=FILE names a certificate to trust"
    reason = f"nothing answers at {url} ({cause}): is an {url.partition(':')[0]} server running?"
    proxies = [name for name in os.environ if name.lower() in _PROXIES]
    if proxies:
        reason += (
            f" Proxies ({proxies[0]}) are not used: reach a server behind one through a tunnel"
        )
    return reason


async def body_of(response: httpx2.Response, most: int = _MOST_OF_EVENT) -> bytes:
    """The body of an answer, cut off after `most` bytes."""
    return await _joined(response.aiter_bytes(), most)


async def _joined(parts: AsyncIterator[bytes], most: int) -> bytes:
    """The parts as one value, cut off after `most` bytes; later parts are not read."""
    data = bytearray()
    async for part in parts:
        data += part
        if len(data) >= most:
            break
    return bytes(data[:most])


async def events(response: httpx2.Response) -> AsyncGenerator[Any]:
    """Yield the JSON of each server-sent event, such as `data: {"choices": ...}`. An answer that is not streamed is a
    single event.

    Raises:
        RunError: if the answer, or one of its events, is too long.
        ValueError: if an event is not JSON in UTF-8.
        httpx2.RequestError: if the connection breaks.
    """
    import httpx2

    parts = response.aiter_bytes()
    beginning = b""
    async for part in parts:
        beginning = (beginning + part).lstrip()
        if beginning:
            break
    # JSON and not `data:`, so the answer is not streamed.
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

    # EventSource accepts only this content type, whatever type the server's answer has. So the answer is wrapped in a
    # new response.
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
