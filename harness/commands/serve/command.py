"""The program of `serve`: loads the pair, and answers requests until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from harness.commands.serve.app import make_app
from harness.commands.serve.record import ServeSettings
from harness.commands.serve.served_model import ServedModel
from harness.config.demand import Demand
from harness.config.errors import SettingError
from harness.config.failures import as_run_error
from harness.config.settings import api_key
from harness.engines.keeper import PairKeeper
from harness.measuring.progress import say

if TYPE_CHECKING:
    from harness.local.serving import LocalService

# After a signal, answers may continue for _GRACE_S seconds. Sending the rest of their texts may take _SENDING_S more.
_GRACE_S = 3
_SENDING_S = 5
# The most simultaneous connections, including those on which a request is incomplete.
_MOST_CONNECTIONS = 1024
# Every this many seconds, a connection is closed if a request on it is incomplete at that moment. So the first request
# of a connection has this time to arrive, and a later one may have less; most arrive within milliseconds.
_REQUEST_S = 60


def run(
    settings: ServeSettings, leaving: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Serve until a signal. After SIGINT or SIGTERM, answers get a few seconds to end; then the function returns.

    Args:
        leaving: makes a context within which a signal ends the process immediately. The model is made ready within it,
            because another thread works then, and the interpreter would crash if it shut down meanwhile.

    Raises:
        SettingError, RunError: if serving cannot begin.
    """
    key = api_key("api_key_variable", settings.api_key_variable)
    # Listen before the weights load, which may take minutes, so that an address that is in use is reported immediately.
    listening = listen(settings)
    try:
        keeper = PairKeeper()
        demand = Demand(
            batch_size=1,
            prompt_tokens=settings.max_prompt_tokens,
            new_tokens=settings.max_new_tokens,
            num_draft_tokens=settings.most_draft_tokens,
            runner=settings.runner,
        )
        placed = keeper.place(settings, demand)
        say(placed.describe())
        keeper.load()
        with leaving():
            served = ServedModel(keeper, settings, say)
        # What exists now stays until the end, so later garbage collections need not search it.
        gc.collect()
        gc.freeze()
    except BaseException as error:
        listening.close()
        raise as_run_error(error) or error from error
    app = make_app(served, key)
    config = uvicorn.Config(
        app,
        http=_Connection,
        log_level="warning",
        access_log=False,
        lifespan="off",  # the application needs no lifespan events, and uvicorn would print an error when it is ended
        timeout_graceful_shutdown=_GRACE_S + _SENDING_S,
    )
    host, port = listening.getsockname()[:2]
    name = f"{served.name} with draft {settings.draft.name}" if settings.draft else served.name
    print(
        f"Serving {name} on http://{f'[{host}]' if ':' in host else host}:{port}/ (Ctrl-C ends)",
        flush=True,
    )
    # uvicorn handles a signal: it stops serving, and then raises the signal again, for which the handler of the command
    # line (`cli/signals.py`) raises KeyboardInterrupt.
    try:
        with suppress(KeyboardInterrupt):
            _Server(config, served.service).run(sockets=[listening])
    finally:
        served.service.close()


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that closes itself if the head or the body of a request does not arrive. uvicorn has no such limit,
    so a client could occupy connections for ever with half of a request.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.close()
        self.loop.call_later(_REQUEST_S, self._close_if_half)

    def _close_if_half(self) -> None:
        """Close the connection if a request is incomplete; otherwise look again later."""
        # The last request whose head has arrived; None before the first.
        last = self.cycle
        # `more_body`: the head has arrived, but not the whole body. After a complete response, uvicorn starts a timer
        # that closes idle connections, and the first bytes of the next request cancel it. So a connection with a
        # complete response but without the timer has received half of a head.
        is_half = last is None or last.more_body
        if is_half or (last.response_complete and self.timeout_keep_alive_task is None):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(_REQUEST_S, self._close_if_half)


class _Server(uvicorn.Server):
    """A server that, after a signal, lets answers continue for a grace period. Longer answers end with an error."""

    def __init__(self, config: uvicorn.Config, service: LocalService) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.to_thread(self._service.close, _GRACE_S)
        await asyncio.gather(closing, super().shutdown(sockets))


def listen(settings: ServeSettings) -> socket.socket:
    """A socket that listens at the address of the settings.

    Raises:
        SettingError: if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=256)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            rule = f"cannot be bound on {settings.host}: {error.strerror}; type another port"
            raise SettingError("port", rule, settings.port) from error
        raise SettingError("host", "must be an address of this machine", settings.host) from error
    # Connections inherit this option. Without it, each piece of an answer after the first waits until the client has
    # acknowledged the piece before, which takes 40 ms on Linux. asyncio only sets it for sockets that it creates.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
