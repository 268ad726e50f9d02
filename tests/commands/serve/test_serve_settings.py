"""Settings that keep `serve` from starting, before weights load; wrong settings are in tests/test_mistakes.py."""

from __future__ import annotations

import socket

import pytest

from harness.commands.serve.record import ServeSettings
from in_process import Harness
from some_settings import settings_of

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")


def test_a_port_in_use(harness: Harness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "port" in harness("serve", f"port={taken.getsockname()[1]}", code=2).complaint


def test_no_piece_of_an_answer_waits_for_the_one_before() -> None:
    from harness.commands.serve.command import listen

    with (
        listen(settings_of(ServeSettings, port=0)) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_there_are_no_sweeps(harness: Harness) -> None:
    assert harness("serve", "-m", "batch_size=1", code=2).complaint == "-m: serve has no sweeps"
