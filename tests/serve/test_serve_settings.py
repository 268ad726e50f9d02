"""Mistakes in the settings of `serve` are one line, before weights load."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from in_process import Harness, in_process

pytest.importorskip("fastapi", reason="harness[serve] is not installed")


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Harness:
    monkeypatch.chdir(tmp_path)
    return in_process(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["host=0.0.0.0"],
            "api_key_variable=None: must name a variable with a key, because others can reach this host",
        ),
        (
            ["host=0.0.0.0", "api_key_variable=NO_KEY"],
            "api_key_variable=NO_KEY: must name a variable of the environment",
        ),
        (["port=70000"], "port=70000: must be from 0 to 65535"),
        (["batch_size=0"], "batch_size=0: must be at least 1"),
        (["max_new_tokens=32"], "decoding.max_new_tokens=64: must be at most max_new_tokens=32"),
        (["engine=huggingface", "batch_size=1"], "engine=huggingface: must be local: serve runs our own loop"),
        (["placement=tensor_parallel"], "placement=tensor_parallel: is for the other commands"),
        (["-m", "batch_size=1,2"], "-m: serve has no sweeps"),
    ],
)
def test_wrong_settings(harness: Harness, settings: list[str], says: str) -> None:
    outcome = harness("serve", *settings)
    assert outcome.exit_code == 2
    assert outcome.complaint == f"harness: {says}"


def test_a_port_in_use(harness: Harness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = harness("serve", f"port={taken.getsockname()[1]}")
    assert outcome.exit_code == 2
    assert "port" in outcome.complaint
