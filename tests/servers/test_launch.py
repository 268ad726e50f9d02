"""Servers that are started here and do not become ready: one line that says why, and where the rest is."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.config.errors import RunError
from harness.servers.command import ServerCommand
from harness.servers.dialects import UNKNOWN_DIALECT
from harness.servers.identity import why_not_ready
from harness.servers.launch import Launch, StartedServer


def launched(directory: Path, *words: str, name: str = "regular", s: float = 600) -> StartedServer:
    command = ServerCommand(words, UNKNOWN_DIALECT)
    return StartedServer(Launch(name, command, directory / "server.log", s))


@pytest.mark.parametrize(
    ("arguments", "answers", "written", "reason"),
    [
        (["-c", "import time; time.sleep(600)"], False, "$ ", "it wrote nothing"),
        (["-c", "import time; print('loading', flush=True); time.sleep(600)"], False, "\nloading", "line is: loading"),
        (["-m", "http.server", "--bind", "127.0.0.1", "{port}"], True, "$ ", "lists no model"),
    ],
    ids=["silent", "loading", "pages"],
)  # fmt: skip
def test_a_server_that_is_never_ready(
    tmp_path: Path, arguments: list[str], answers: bool, written: str, reason: str
) -> None:
    log = tmp_path / "server.log"
    server = launched(tmp_path, sys.executable, *arguments, name="speculative", s=0.1)
    try:
        while answers and not why_not_ready(server.url, None):
            time.sleep(0.05)
        while written not in log.read_text():
            time.sleep(0.05)
        with pytest.raises(RunError) as caught:
            server.wait_until_ready(lambda line: None, None)
    finally:
        server.stop()
    line = str(caught.value)
    assert "the speculative server was not ready within engine.start_timeout_s=0.1: " in line
    assert reason in line
    assert line.endswith(f"(all of it: {log})")


VLLM_ENDS = """ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -4)
INFO:     127.0.0.1:46124 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error"""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL (often: main memory ran out): it wrote"),
        ("os.kill(os.getpid(), 4)", "was ended by SIGILL (an instruction that this processor"),
        ("sys.exit('exiting due to HTTP server error')", "HTTP server error"),
        ("sys.exit('failed: X.gguf\\nexiting due to an error')", "exit code 1: failed: X.gguf"),
        ("sys.exit(0)", "ended with exit code 0: it wrote nothing"),
        ("sys.stdout.write('error: ' + 'y' * 500_000); sys.stdout.flush(); os._exit(1)", "exit code 1: error: yyy"),
        ("sys.exit('OSError: no room\\n$ rm model\\nbye')", "exit code 1: OSError: no room"),
        (f"sys.exit({VLLM_ENDS!r})", "exit code 1: ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -4)"),
        # A file of a terabyte, without its bytes.
        ("os.ftruncate(1, 1 << 40); sys.exit('\\nerror: full')", "exit code 1: error: full"),
    ],
)  # fmt: skip
def test_a_server_that_ends_says_why(tmp_path: Path, program: str, reason: str) -> None:
    server = launched(tmp_path, sys.executable, "-c", f"import os, sys; {program}")
    try:
        with pytest.raises(RunError) as caught:
            server.wait_until_ready(lambda line: None, None)
    finally:
        server.stop()
    assert reason in str(caught.value)


def test_a_log_keeps_no_key_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "q7Zp2Lw9Xc4Vb1Nm6Rt8Ky"
    for name in ("MY_KEY", "THE_TOKEN"):
        monkeypatch.setenv(name, f"{name}{key}")
    # The last megabytes of a file of a terabyte, without its bytes, too.
    program = 'echo "cannot use $MY_KEY $MY_KEY"; truncate -s 1T server.log; echo; echo "error: $THE_TOKEN"; exit 1'
    monkeypatch.chdir(tmp_path)
    server = launched(tmp_path, "sh", "-c", program)
    with pytest.raises(RunError, match=r"exit code 1: error: \*+ \("):
        server.wait_until_ready(lambda line: None, None)
    server.stop()
    with (tmp_path / "server.log").open("rb") as log:
        begin = log.read(10_000)
        log.seek(-1000, 2)
        assert key.encode() not in begin + log.read()
    assert b"cannot use **********" in begin


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_server_ends_with_its_guard_when_that_is_killed(tmp_path: Path) -> None:
    server = launched(tmp_path, sys.executable, "-c", "import time; time.sleep(600)")
    guard = psutil.Process(server._guard.pid)
    # Its own program by then, and no longer the guard's copy, which has not asked for anything yet.
    while not any(child.cmdline()[1:2] == ["-c"] for child in guard.children()):
        time.sleep(0.05)
    [child] = guard.children()
    guard.kill()
    server.stop()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


def test_a_container_ends_with_its_server(tmp_path: Path) -> None:
    """It is a child of a daemon: to end its client, as a guard could, would leave it."""
    docker = tmp_path / "docker"
    docker.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        "place = pathlib.Path(__file__).parent\n"
        "if 'kill' in sys.argv:\n"
        "    (place / 'killed').write_text(sys.argv[-1])\n"
        "else:\n"
        "    assert sum(word.startswith('--cidfile') for word in sys.argv) == 1\n"
        "    pathlib.Path(sys.argv[sys.argv.index('--cidfile') + 1]).write_text('c0ffee')\n"
        "    (place / 'runs').touch()\n"
        "    time.sleep(600)\n"
    )
    docker.chmod(0o755)
    for options in ((), (), ("--context", "gpu")):
        words = (*options, "run", "--rm", "-p", "{port}:8000", "vllm/vllm-openai")
        server = launched(tmp_path, str(docker), *words)
        while not (tmp_path / "runs").exists():
            time.sleep(0.05)
        server.stop()
        assert (tmp_path / "killed").read_text() == "c0ffee"
        (tmp_path / "killed").unlink()
        (tmp_path / "runs").unlink()
