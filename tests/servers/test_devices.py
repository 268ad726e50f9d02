"""Devices are those on which a server computes, never those that the machine has beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from harness.config import machine
from harness.config.machine import cpu_name
from harness.servers import devices
from harness.servers.devices import devices_of
from in_process import Harness, only, results
from real_servers import gguf_pair, llama_server

NAMES = ["NVIDIA H200", "NVIDIA A100"]


def pretend(monkeypatch: pytest.MonkeyPatch, computing: Mapping[int, Sequence[int]]) -> None:
    """Two GPUs, and the processes that compute on each."""

    def running(handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in computing.get(handle, ())]

    functions: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(NAMES),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": NAMES.__getitem__,
        "nvmlDeviceGetComputeRunningProcesses": running,
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [],
    }
    for name, function in functions.items():
        monkeypatch.setattr(devices.pynvml, name, function)
    monkeypatch.setattr(machine, "_all_gpus", lambda: NAMES)


SERVER = """
import socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 0))
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
files = [open(name) for name in sys.argv[1:]]
print(server.getsockname()[1], child.pid, flush=True)
input()
child.communicate()
"""


@contextmanager
def listening(*files: str) -> Iterator[tuple[str, int]]:
    """The address of a process that holds files open, and the process that it has started."""
    command = [sys.executable, "-c", SERVER, *files]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        port, child = process.stdout.readline().split()
        try:
            yield f"http://127.0.0.1:{port}/v1", int(child)
        finally:
            process.communicate("\n")


def test_a_server_has_the_gpus_on_which_its_processes_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process below the one that listens, as vLLM's engine; the other GPU is somebody else's."""
    with listening() as (url, child):
        pretend(monkeypatch, {0: [1], 1: [child]})
        for starter in (os.getpid(), None):
            assert devices_of(url, starter) == ["NVIDIA A100"]
        pretend(monkeypatch, {0: [1]})
        # What listens may pass on what it gets, unless it was started here.
        assert devices_of(url, None) == []
        assert devices_of(url, os.getpid()) == [cpu_name()]
        # A container: nothing that was started here listens.
        assert devices_of("http://127.0.0.1:1/v1", os.getpid()) == []
        assert devices_of("http://gpu1:8000/v1", None) == []


def test_what_holds_an_accelerator_may_compute_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where no driver says on which GPU it does: in a container, or of another maker."""
    file = tmp_path / "renderD128"
    file.touch()
    monkeypatch.setattr(devices, "_ACCELERATOR", re.compile(re.escape(str(file))))
    with listening(str(file)) as (url, _):
        assert devices_of(url, os.getpid()) == []
    with listening() as (url, _):
        assert devices_of(url, os.getpid()) == [cpu_name()]


def test_a_page_names_a_gpu_where_the_server_computes_on_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-ngl 99` says what llama.cpp may do, and not that it has a GPU."""
    pretend(monkeypatch, {})
    monkeypatch.setattr(
        devices.pynvml,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: psutil.Process().children(recursive=True) * handle,
    )
    model, draft = gguf_pair()
    words = ["-m", model, "-md", draft, "--spec-type", "draft-simple", "-ngl", "99"]
    asked = "num_prompts=3 tokens=8 prompts=tiny engine.blocks=0".split()
    page = harness("latency", *asked, "--", llama_server(), *words).stdout
    named = "NVIDIA A100"
    assert set(results()["devices"]) == {named}
    assert named in " ".join(page.split())
    assert json.loads(only("environment.json").read_text())["devices"] == [named]
    assert "NVIDIA H200" not in page
