"""Tests end: one that takes too long shows all stacks, the others run, and no process with threads is forked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

import fork_server
import time_limit
from forked import begin_program
from processes import wait_for

ROOT = Path(__file__).parents[1]
# The second test begins when the process of the first one waits.
HANGING = """
import subprocess, sys
import pytest

CHILD = "def in_child():\\n    print(flush=True)\\n    input()\\nin_child()"

def test_before():
    global child
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    with open("number", "w") as file:
        file.write(str(child.pid))

def wait_for_child():
    child.wait()

@pytest.mark.timeout(0.1)
def test_hangs():
    print("captured words")
    wait_for_child()

def test_after():
    pass
"""


@pytest.mark.slow
def test_a_test_that_hangs_shows_all_stacks_and_ends_alone(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "conftest"]
    # What the tests share is none of theirs.
    environment = {name: value for name, value in os.environ.items() if name != time_limit.STACKS}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "1", "test_hanging.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    shown = done.stdout + done.stderr
    for place in ("in wait_for_child", "in in_child", "captured words"):
        assert place in shown
    with suppress(psutil.NoSuchProcess):
        # It ends, if not yet, and may then wait to be read by whoever inherited it.
        child = psutil.Process(int((tmp_path / "number").read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
    assert "1 failed, 2 passed, 1 skipped" in done.stdout


def hang_in_a_fork() -> None:
    Path("begun").touch()
    time.sleep(3600)


def test_forked_processes_show_their_stacks(tmp_path: Path) -> None:
    hanging = begin_program(hang_in_a_fork, tmp_path)
    wait_for(hanging, tmp_path, until="begun")
    assert "in hang_in_a_fork" in time_limit.stacks_of([psutil.Process(hanging.pid)])
    hanging.kill()


def test_a_process_with_threads_is_not_forked() -> None:
    ours, theirs = socket.socketpair()
    # The time limit of this test is a thread.
    fork_server._fork(theirs, {})
    assert "threads: it must not fork" in Connection(ours.detach()).recv()
