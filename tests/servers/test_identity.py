"""What a server is taken for, by its pages, its devices, and why one that is started here is not ready."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from harness.config import machine
from harness.config.errors import RunError, SettingError
from harness.config.machine import cpu_name
from harness.servers import devices, dialects
from harness.servers.command import ServerCommand
from harness.servers.counters import read_counters
from harness.servers.devices import devices_of
from harness.servers.dialects import UNKNOWN_DIALECT
from harness.servers.identity import (
    ListedModel,
    ServerReport,
    choose_model,
    samples,
    server_report,
    start_time,
    why_not_ready,
)
from harness.servers.launch import Launch, StartedServer
from in_process import Harness, only, results
from real_servers import gguf_pair, llama_server

LIST = {"data": [{"id": "m", "owned_by": "llamacpp"}]}


@contextmanager
def pages(**answers: int | str | Mapping[str, Any]) -> Iterator[str]:
    """The API of a server with these pages, by the last part of their path: a status, content, or where it is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.rpartition("/")[2], 404)
            if isinstance(answer, str):
                self.send_response(307)
                self.send_header("Location", answer)
                answer = {}
            else:
                self.send_response(answer if isinstance(answer, int) else 200)
            body = b"" if isinstance(answer, int) else json.dumps(answer).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_without_a_page_of_health_a_server_is_ready_by_its_list() -> None:
    for health, models, said in [
        *((status, LIST, "None") for status in (404, 405, 501)),
        # Where there is such a page it decides, also against the list.
        (503, LIST, "/health answers"),
        ({}, {"data": []}, "None"),
    ]:
        with pages(health=health, models=models) as url:
            assert said in str(why_not_ready(url, None))


def test_a_broken_page_or_entry_takes_only_its_own_part_of_the_report() -> None:
    with pages(models=LIST, props=500, metrics=500, version={"version": "1.2"}) as url:
        report = server_report(url, None)
    assert report is not None
    assert report.models == [ListedModel("m", owner="llamacpp")]
    assert report.about["/version version"] == "1.2"
    with pages(models=503) as url:
        assert server_report(url, None) is None
    listed = ["a", {"id": 3}, {"id": "base", "max_model_len": True, "owned_by": 1}]
    with pages(models={"data": listed}) as url:
        report = server_report(url, None)
    assert report is not None
    assert report.models == [ListedModel("base")]


def test_a_page_of_another_server_is_not_read() -> None:
    with pages(models=LIST, version={"version": "1.2"}) as other:
        with pages(models=f"{other}/models") as url, pytest.raises(RunError) as refused:
            server_report(url, None)
        with pages(models=LIST, version=f"{other}/version") as url:
            report = server_report(url, None)
        with pages(models=f"{other}/models") as url:
            assert f"redirects to {other}/models" in str(why_not_ready(url, None))
    assert f"redirects to {other}/models, another server: use that address" in str(refused.value)
    assert report is not None
    assert "/version version" not in report.about


def test_a_dialect_in_a_file_is_known_once_it_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from harness.servers.dialects import Dialect\n"
        'MINE = Dialect(name="mine", title="Mine", counters={"mine:generated": "generated"},\n'
        '    counts_in_any_case="mine:generated")\n'
    )
    assert "mine:generated" not in dialects.known_counters()
    dialects.dialect_of(None, f"{file}:MINE")
    assert dialects.known_counters()["mine:generated"] == "generated"
    assert dialects.would_show_drafts("mine:generated_total")


@pytest.mark.parametrize(
    ("listed", "name", "typed_model", "chosen"),
    [
        (["a", "b"], "b", "a", "b"),
        (["a", "b"], None, "b", "b"),
        (["a"], None, None, "a"),
        # The command names a repository, and the list has its file.
        (["a"], None, "org/a", "a"),
        # Several, and nothing typed is among them.
        (["a", "b"], None, None, None),
        (["a", "b"], None, "c", None),
        (["a"], "c", "a", None),
        ([], None, "c", "c"),
        ([], None, None, "org/x"),
    ],
)
def test_the_model_is_the_typed_one_or_the_only_one(
    listed: list[str], name: str | None, typed_model: str | None, chosen: str | None
) -> None:
    models = [ListedModel(each, owner="vllm") for each in listed]
    report = ServerReport({}, None, models)
    setting, place = "engine.model", "engine.url=U"
    if chosen is None:
        names = ", ".join(listed)
        with pytest.raises(SettingError, match=f"must name a model that {place} serves: {names}$"):
            choose_model(report, "org/x", name, typed_model, setting, place)
        return
    found = choose_model(report, "org/x", name, typed_model, setting, place)
    assert (found.name, found.is_listed) == (chosen, bool(listed))


def test_a_model_may_be_known_by_its_place_or_not_be_listed(tmp_path: Path) -> None:
    """By where a link leads; a server of no known kind may serve what it does not list."""
    (tmp_path / "Llama-8B").mkdir()
    link = tmp_path / "mine"
    link.symlink_to(tmp_path / "Llama-8B")
    listed = [ListedModel("other", "/x/other"), ListedModel("served", str(tmp_path / "Llama-8B"))]
    report = ServerReport({}, None, listed)
    for typed, name in ((str(link), "served"), ("c", "c")):
        chosen = choose_model(report, "org/x", None, typed, "engine.model", "engine.url")
        assert (chosen.name, chosen.is_listed) == (name, typed != "c")


DIGITS = "1" * 400


def test_damaged_pages_of_counters_say_nothing() -> None:
    """What makes the parser raise, and numbers that no counter, position or start has."""
    assert samples('x{a="1", ="2"} 3') == samples(f"x 1 {DIGITS}") == []
    positions = (3_000_000_000, DIGITS)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    accepted = [f'{name}{{position="{place}"}} 0' for place in positions]
    page = "\n".join([f"vllm:generation_tokens_total {DIGITS}", *accepted, ""])
    assert not read_counters(page).accepted_at
    numbers = ("NaN", "0", "+Inf", DIGITS)
    starts = [start_time(f"process_start_time_seconds {start}\n") for start in numbers]
    assert starts == [None] * 4


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


def test_a_server_has_the_gpus_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
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
    name = "nvmlDeviceGetComputeRunningProcesses"
    running = psutil.Process().children
    monkeypatch.setattr(devices.pynvml, name, lambda handle: running(recursive=True) * handle)
    model, draft = gguf_pair()
    words = ["-m", model, "-md", draft, "--spec-type", "draft-simple", "-ngl", "99"]
    asked = "num_prompts=3 tokens=8 prompts=tiny engine.blocks=0".split()
    page = harness("latency", *asked, "--", llama_server(), *words).stdout
    named = "NVIDIA A100"
    assert set(results()["devices"]) == {named}
    assert named in " ".join(page.split())
    assert json.loads(only("environment.json").read_text())["devices"] == [named]
    assert "NVIDIA H200" not in page


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


# The reason, and what llama.cpp says of it: on a GPU without room, and after a start that was tried again.
LLAMA_CPP_ENDS = """0.03.656.949 E ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory
0.03.656.999 E llama_kv_cache: failed to allocate buffer for kv cache
0.03.657.612 E srv    load_model: failed to load draft model, 'D.gguf'
0.03.657.700 I srv    operator(): operator(): cleaning up before exit...
0.03.657.800 E srv  llama_server: exiting due to model loading error"""
LLAMA_CPP_RETRIES = """0.00.013.105 E llama_init_from_model: failed to initialize the context: std::bad_alloc
0.00.013.120 E common_fit_params: encountered an error while trying to fit params
0.00.013.500 W llama_context: n_ctx_seq (900000000) > n_ctx_train (512)
0.00.015.367 E llama_prepare_model_devices: LLAMA_SPLIT_MODE_TENSOR needs >= 1 devices
0.00.015.486 E llama_model_load_from_file_impl: failed to load model"""
VLLM_ENDS = """ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -4)
INFO:     127.0.0.1:46124 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error"""
VLLM_DIES = """ERROR 11-25 12:06:16 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.
ERROR 11-25 12:06:16 [async_llm.py:1]     raise self._format_exception(outputs) from None
ERROR 11-25 12:06:16 [async_llm.py:1] EngineDeadError: See stack trace (above) for the root cause."""
SGLANG_ENDS = """RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
Received sigquit from a child process. It usually means the child failed."""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL (often: main memory ran out) (all"),
        ("os.kill(os.getpid(), 4)", "was ended by SIGILL (an instruction that this processor"),
        ("sys.exit('exiting due to HTTP server error')", "HTTP server error"),
        ("sys.exit('failed: X.gguf\\nexiting due to an error')", "exit code 1: failed: X.gguf"),
        ("sys.exit(0)", "ended with exit code 0: it wrote nothing"),
        ("sys.stdout.write('error: ' + 'y' * 500_000); sys.stdout.flush(); os._exit(1)", "exit code 1: error: yyy"),
        ("sys.exit('OSError: no room\\n$ rm model\\nbye')", "exit code 1: OSError: no room"),
        (f"sys.exit({LLAMA_CPP_ENDS!r})", "E ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of"),
        (f"sys.exit({LLAMA_CPP_RETRIES!r})", "LLAMA_SPLIT_MODE_TENSOR needs >= 1 devices ("),
        (f"sys.exit({VLLM_ENDS!r})", "exit code 1: ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -4)"),
        (f"sys.exit({VLLM_DIES!r})", "torch.OutOfMemoryError: CUDA out of memory."),
        (f"print({SGLANG_ENDS!r}, flush=True); os.kill(os.getpid(), 9)", "by SIGKILL: RuntimeError: Not enough memory"),
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
        "#!/usr/bin/env python3\n"
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
    for wrapper, options in (((), ()), ((), ()), (("env", "-u", "run"), ("--context", "gpu"))):
        words = (*options, "run", "--rm", "-p", "{port}:8000", "vllm/vllm-openai")
        server = launched(tmp_path, *wrapper, str(docker), *words)
        while not (tmp_path / "runs").exists():
            time.sleep(0.05)
        server.stop()
        assert (tmp_path / "killed").read_text() == "c0ffee"
        (tmp_path / "killed").unlink()
        (tmp_path / "runs").unlink()
