"""Servers that are started here and do not become ready: one line that says why, and where the rest is."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from harness.config.errors import RunError
from harness.engines.server.identity import page_of
from harness.engines.server.launch import Launch, StartedServer


@pytest.mark.parametrize(
    ("arguments", "answers", "reason"),
    [
        (["-c", "import time; time.sleep(600)"], False, "it wrote nothing"),
        (["-m", "http.server", "--bind", "127.0.0.1", "{port}"], True, "lists no model"),
    ],
    ids=["silent", "pages"],
)
def test_a_server_that_is_never_ready(
    tmp_path: Path, arguments: list[str], answers: bool, reason: str
) -> None:
    log = tmp_path / "server.log"
    server = StartedServer("speculative", Launch([sys.executable, *arguments], {}, log, 0.1))
    try:
        while answers and page_of(server.url.removesuffix("/v1"), None) is None:
            time.sleep(0.05)
        with pytest.raises(RunError) as caught:
            server.wait_until_ready(lambda line: None, None)
    finally:
        server.stop()
    line = str(caught.value)
    assert "the speculative server was not ready within engine.start_timeout_s=0.1: " in line
    assert reason in line
    assert line.endswith(f"(all of it: {log})")
