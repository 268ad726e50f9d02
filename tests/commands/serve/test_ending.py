"""Signals that end the service in a new interpreter, whose threads must not compute while it shuts down."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from in_process import QUICKEST_PAIR
from processes import HARNESS, end, start

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


def test_a_service_that_has_answered_ends_well(tmp_path: Path) -> None:
    command = [*HARNESS, "serve", "port=0", *QUICKEST_PAIR]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, text=True, **pipes)
    try:
        url = process.stdout.readline().split(" on ")[1].split()[0]
        body = {"prompt": "a", "max_tokens": 4}
        assert httpx.post(f"{url}v1/completions", json=body, timeout=None).status_code == 200
        _, stderr = end(process, signal.SIGINT, 0)
    finally:
        process.kill()
    assert "Traceback" not in stderr
    assert "terminate called" not in stderr
    assert list(tmp_path.iterdir()) == []
