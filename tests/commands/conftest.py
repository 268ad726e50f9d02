"""Servers of the tests, and the settings with their addresses."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from echo_server import EchoServer, Serve, serving


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, the one that speculates last, each once, until the test ends; gives the settings."""
    urls: dict[int, str] = {}
    with ExitStack() as stack:

        def start(*servers: EchoServer) -> list[str]:
            for server in servers:
                if id(server) not in urls:
                    urls[id(server)] = stack.enter_context(serving(server))
            settings = ["engine.regular_url", "engine.url"][-len(servers) :]
            pairs = zip(settings, servers, strict=True)
            return [f"{setting}={urls[id(server)]}" for setting, server in pairs]

        yield start
