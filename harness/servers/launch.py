"""The life of a server that the harness starts: a free port, its output in a file, ready or failed
with the reason, and ended however this process ends (`guard`).
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.config.errors import RunError, from_outside
from harness.config.secrets import keys_here
from harness.servers.command import CONTAINERS, ServerCommand
from harness.servers.identity import why_not_ready

_GUARD = Path(__file__).with_name("guard.py")
_PORTS = range(15_000, 32_768)
# Seconds between two questions whether it is ready, and between two lines about that.
_LOOK_S = 0.1
_SAY_S = 20.0
# More than the guard takes to kill what does not end by itself.
_MOST_STOPPING_S = 30.0
# The end of a server is noticed within this time.
_MOST_ENDING_S = 2.0
_MOST_OF_LOG = 4_000_000
# Lines with the reason why a server ended. The last lines of vLLM and llama.cpp only point to a line above, and
# `"POST /v1/completions HTTP/1.1" 500 Internal Server Error` is one of uvicorn's lines about each request.
_REASON = re.compile(
    r"\w*(error|exception|out of memory|cannot|failed|died unexpectedly)\b", re.IGNORECASE
)
# llama.cpp's lines of the level of errors, `0.00.015.367 E llama_prepare_model_devices: ...`.
_ERROR_OF_LLAMA_CPP = re.compile(r"[\d.]+ E ")
_POINTS_ELSEWHERE = re.compile(
    r"see root cause above|traceback|failed core proc|\braise \w+\(|exiting due to| HTTP/\d\.\d\" \d{3}",
    re.IGNORECASE,
)
# What the signal that ended a server usually means.
_MEANT_BY_SIGNAL = {
    signal.SIGKILL: "often: main memory ran out",
    signal.SIGILL: "an instruction that this processor lacks: another build of the server is needed",
}


@dataclass(frozen=True)
class Launch:
    """How the server of an arm is started.

    Attributes:
        name: what messages call the server.
        command: `{port}` stands for a free port.
        log: the file that its output is appended to.
        timeout_s: until it must be ready.
    """

    name: str
    command: ServerCommand
    log: Path
    timeout_s: float

    def __str__(self) -> str:
        return shlex.join(self.command.words)


@dataclass(frozen=True)
class Served:
    """Where the server of an arm is.

    Attributes:
        name: of the arm.
        setting: that has its address, `engine.url`, or `the regular command`.
        model: the name under which it serves the model, as typed; None for its only one.
        url: its address; None for one that is started here.
        pages: of its counters, where they are not below its address.
        launch: how it is started here.
    """

    name: str
    setting: str
    model: str | None = None
    url: str | None = None
    pages: Sequence[str] = ()
    launch: Launch | None = None


class StartedServer:
    """A server that was started here.

    Attributes:
        url: of its API.
    """

    def __init__(self, launch: Launch) -> None:
        self.name = launch.name
        self._launch = launch
        words = launch.command.words
        port = _free_port()
        command = [word.replace("{port}", str(port)) for word in words]
        command = _with_container_id(command, launch.log.with_suffix(".cid"))
        self.url = f"http://127.0.0.1:{port}/v1"
        self._started = time.monotonic()
        with launch.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-P", str(_GUARD), str(launch.log), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        # The guard takes these keys out of the log. If it died at once, `ended` says why.
        with suppress(BrokenPipeError):
            self._guard.stdin.write(f"{json.dumps(sorted(keys_here()))}\n".encode())
            self._guard.stdin.flush()

    @property
    def pid(self) -> int:
        """The ancestor of all its processes, but for those of a container."""
        return self._guard.pid

    @property
    def ended(self) -> str | None:
        """Why it has ended, from its output; None while it runs."""
        code = self._guard.poll()
        if code is None:
            return None
        # The guard ends with 128 and the signal: 137 is `was ended by SIGKILL (often: main memory ran out)`.
        try:
            ended_by = signal.Signals(code - 128)
        except ValueError:
            how = f"ended with exit code {code}"
        else:
            meaning = _MEANT_BY_SIGNAL.get(ended_by)
            how = f"was ended by {ended_by.name}" + (f" ({meaning})" if meaning else "")
        lines = self._log or ["it wrote nothing"]
        reason = lines[-1]
        was_error = False
        for line in lines:
            is_error = _ERROR_OF_LLAMA_CPP.match(line) is not None
            # The first of several errors in a row is the reason, and the others are its consequences.
            is_reason = not was_error if is_error else _REASON.search(line)
            was_error = is_error
            if is_reason and not _POINTS_ELSEWHERE.search(line):
                reason = line
        return f"the {self.name} server {how}: {reason} (all of it: {self._launch.log})"

    def why_ended(self) -> str | None:
        """Why it has ended, of a server that just closed a connection: its guard sees the end a moment later."""
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(_MOST_ENDING_S)
        return self.ended

    def wait_until_ready(self, say: Callable[[str], None], key: str | None) -> None:
        """Wait until it answers.

        Args:
            say: gets a line now and then where that takes long, with the last line of the server's output.
            key: of its API.

        Raises:
            RunError: it has ended, or is not ready in time.
            SettingError: it wants a key.
        """
        next_line_s = _SAY_S
        while (why_not := why_not_ready(self.url, key)) is not None:
            reason = self.ended
            if reason is not None:
                raise RunError(reason)
            seconds = time.monotonic() - self._started
            launch = self._launch
            if seconds > min(launch.timeout_s, next_line_s):
                log = self._log
                last = f"its last line is: {log[-1]}" if log else "it wrote nothing"
                why = f"{why_not}; {last}" if why_not else last
                if seconds > launch.timeout_s:
                    limit = f"engine.start_timeout_s={launch.timeout_s:g}"
                    raise RunError(
                        f"the {self.name} server was not ready within {limit}: {why} (all of it: {launch.log})"
                    )
                say(f"{self.name}: starting for {seconds:.0f} s: {why}")
                # From now on: while the other server was waited for, several may have been due.
                next_line_s = seconds + _SAY_S
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End it, and wait until no process of it is left: the guard ends it when its own input closes."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(_MOST_STOPPING_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    @property
    def _log(self) -> list[str]:
        """The lines of its output since its start, of a long one the last."""
        with self._launch.log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _MOST_OF_LOG))
            output = file.read().decode(errors="replace")
        lines = [from_outside(line) for line in output.splitlines()]
        return [line for line in lines if line]


def _with_container_id(command: list[str], file: Path) -> list[str]:
    """The command of a container with a file for its id, by which the guard ends it."""
    names = [PurePosixPath(word).name for word in command]
    for index, name in enumerate(names):
        # `docker compose run` has no such flag; `docker container run` does.
        behind_name = names[index + 1 : index + 4]
        if name in CONTAINERS and "run" in behind_name and "compose" not in behind_name:
            # Of an earlier start: `docker run` refuses a file that exists.
            file.unlink(missing_ok=True)
            behind = names.index("run", index) + 1
            return [*command[:behind], "--cidfile", str(file), *command[behind:]]
    return command


def _free_port() -> int:
    """A port that nothing listens on, below those that Linux gives to outgoing connections: one of these would soon be
    taken.
    """
    # Programs that seed `random` alike, and run side by side, would try the same ports.
    for port in random.SystemRandom().sample(_PORTS, 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RunError(
        f"no port of 127.0.0.1 is free, of 1000 that were tried from {_PORTS[0]} to {_PORTS[-1]}"
    )
