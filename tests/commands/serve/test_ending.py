"""Signals while the service still loads."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from processes import end, start

pytest.importorskip("fastapi", reason="harness[serve] is not installed")

# The command with an engine that never opens, because its thread computes.
PROGRAM = """
import pathlib
import torch
import harness.cli
import harness.commands.serve.service

def compute(service):
    pathlib.Path("opening").touch()
    while True:
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)

harness.commands.serve.service.Service._open = compute
harness.cli.main()
"""


def test_a_service_that_still_loads_ends_quietly(tmp_path: Path) -> None:
    """All signals have one handler, which tests/sweep/test_signals.py tries with each."""
    program = [sys.executable, "-c", PROGRAM]
    run = start("serve", "port=0", cwd=tmp_path, until="opening", command=program)
    stdout, stderr = end(run, signal.SIGTERM, 130)
    assert stdout == ""
    assert stderr.splitlines()[-1] == "harness: interrupted; what was measured so far is kept"
    assert "terminate called" not in stderr
