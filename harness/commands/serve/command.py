"""`serve`: load the pair, and answer until Ctrl-C."""

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

# Seconds after a signal in which answers may end, and then those in which the rest of them is sent.
_GRACE_S = 3
_SENDING_S = 5
# Connections at once, those with half a request among them.
_MOST_CONNECTIONS = 1024
# Seconds in which a whole request must arrive.
_REQUEST_S = 60


def run(
    settings: ServeSettings, loading: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Serve until a signal ends it. Raises SettingError or RunError where that cannot begin.

    Args:
        loading: a context in which the engine is opened by another thread; signals end the process in it.
    """
    key = api_key("api_key_variable", settings.api_key_variable)
    # Before the weights load, which may take minutes.
    listening = listen(settings)
    try:
        keeper = PairKeeper()
        demand = Demand(
            1,
            prompt_tokens=settings.max_prompt_tokens,
            new_tokens=settings.max_new_tokens,
            num_draft_tokens=settings.most_draft_tokens,
            runner=settings.runner,
        )
        placed = keeper.place(settings, demand)
        say(placed.describe())
        keeper.load()
        with loading():
            served = ServedModel(keeper, settings, say)
        gc.collect()
        gc.freeze()
    except BaseException as error:
        listening.close()
        explained = as_run_error(error) if isinstance(error, Exception) else None
        raise explained or error from error
    app = make_app(served, key)
    config = uvicorn.Config(
        app,
        http=_Connection,
        log_level="warning",
        access_log=False,
        lifespan="off",  # the application has none, and uvicorn prints how its own is cut short
        timeout_graceful_shutdown=_GRACE_S + _SENDING_S,
    )
    host, port = listening.getsockname()[:2]
    name = f"{served.name} with draft {settings.draft.name}" if settings.draft else served.name
    print(
        f"Serving {name} on http://{f'[{host}]' if ':' in host else host}:{port}/ (Ctrl-C ends)",
        flush=True,
    )
    # uvicorn takes the signals, ends, and passes them on.
    try:
        with suppress(KeyboardInterrupt):
            _Server(config, served.service).run(sockets=[listening])
    finally:
        served.service.close()


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes itself if the head or the body of a request never ends; uvicorn has no such limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.close()
        self.loop.call_later(_REQUEST_S, self._close_if_half)

    def _close_if_half(self) -> None:
        last = self.cycle
        # uvicorn closes idle connections by a timer, which the first bytes of a request end.
        is_half = last is None or last.more_body
        if is_half or (last.response_complete and self.timeout_keep_alive_task is None):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(_REQUEST_S, self._close_if_half)


class _Server(uvicorn.Server):
    """Lets answers end within a grace period after a signal; the others end with an error."""

    def __init__(self, config: uvicorn.Config, service: LocalService) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.to_thread(self._service.close, _GRACE_S)
        await asyncio.gather(closing, super().shutdown(sockets))


def listen(settings: ServeSettings) -> socket.socket:
    """A socket at the address of the settings. Raises SettingError where there can be none."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=256)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            rule = f"cannot be bound on {settings.host}: {error.strerror}; type another port"
            raise SettingError("port", rule, settings.port) from error
        raise SettingError("host", "must be an address of this machine", settings.host) from error
    # Connections inherit it. Without it each piece of an answer but the first waits for the client
    # to acknowledge the one before, 40 ms on Linux; asyncio sets it for sockets of its own alone.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
