"""A signal that ends the service in a new interpreter, whose threads must not compute while it shuts down."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from processes import end, start

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")


# The command with an engine that never opens, because its thread computes.
PROGRAM = """
import pathlib
import torch
import harness.cli.main
import harness.commands.serve.served_model

def compute(*arguments):
    pathlib.Path("opening").touch()
    while True:
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)

harness.commands.serve.served_model._open_engine = compute
harness.cli.main.main()
"""


def test_a_service_that_still_loads_ends_quietly(tmp_path: Path) -> None:
    """All signals have one handler, which tests/cli/test_signals.py tries with each."""
    program = [sys.executable, "-c", PROGRAM]
    run = start("serve", "port=0", cwd=tmp_path, until="opening", command=program)
    stdout, stderr = end(run, signal.SIGTERM, 130)
    assert stdout == ""
    assert stderr.splitlines()[-1] == "harness: interrupted; what was measured so far is kept"
    assert "terminate called" not in stderr
