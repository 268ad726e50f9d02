from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from echo_questions import Open, engine_of
from echo_server import EchoServer, serving
from harness.servers.engine import ServerEngine


@pytest.fixture
def open_engine() -> Iterator[Open]:
    """A function that starts these echo servers (a regular one before the other) and an engine for them."""
    with ExitStack() as stack:

        def opened(*servers: EchoServer, batch_size: int = 1, **settings: object) -> ServerEngine:
            urls = [stack.enter_context(serving(server)) for server in servers]
            named = dict(zip(("url", "regular_url"), reversed(urls), strict=False))
            engine = engine_of(batch_size, **named, **settings)
            for server in servers:
                server.bodies.clear()
            stack.callback(engine.close)
            return engine

        yield opened
