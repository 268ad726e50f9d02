"""Starts and ends servers. A server gets a free port, and its output goes to a file. It becomes ready, or fails with a
reason. It is ended however this process ends (`guard`).
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
_PORTS = range(15_000, 32_768)  # see `_free_port`
# Seconds between two checks whether a server is ready, and between two messages that it is not.
_LOOK_S = 0.1
_SAY_S = 20.0
# Seconds to wait for the guard to exit. The guard takes less time to kill all processes that do not end by themselves.
_MOST_STOPPING_S = 30.0
# The guard notices the end of a server within this many seconds.
_MOST_ENDING_S = 2.0
# Bytes at the end of a long log that are read.
_MOST_OF_LOG = 4_000_000
# Lines of a log that may contain the reason why a server ended. The level of vLLM's lines (`ERROR 11-25 12:06:16`) does
# not count. `_POINTS_ELSEWHERE` excludes the last lines of vLLM, SGLang and llama.cpp, which only refer to an earlier
# line, and uvicorn's lines about single requests, such as `"POST /v1/completions HTTP/1.1" 500 Internal Server Error`.
_REASON = re.compile(
    r"\w*(error|exception|out of memory|cannot|failed|died unexpectedly)\b(?! \d\d-\d\d )",
    re.IGNORECASE,
)
# llama.cpp's lines of level E (error), such as `0.00.015.367 E llama_prepare_model_devices: ...`.
_ERROR_OF_LLAMA_CPP = re.compile(r"[\d.]+ E ")
_POINTS_ELSEWHERE = re.compile(
    r"root cause|traceback|child failed|\braise [\w.]+\(|exiting due to| HTTP/\d\.\d\" \d{3}",
    re.IGNORECASE,
)
# The usual meaning of the signal that ended a server.
_MEANT_BY_SIGNAL = {
    signal.SIGKILL: "often: main memory ran out",
    signal.SIGILL: "an instruction that this processor lacks: another build of the server is needed",
}


@dataclass(frozen=True)
class Launch:
    """How the server of an arm is started.

    Attributes:
        name: the server's name in messages.
        command: the command, in which `{port}` stands for a free port.
        log: the file to which the server's output is appended.
        timeout_s: seconds within which it must be ready.
    """

    name: str
    command: ServerCommand
    log: Path
    timeout_s: float

    def __str__(self) -> str:
        return shlex.join(self.command.words)


@dataclass(frozen=True)
class Served:
    """The server of an arm: its address, or how it is started.

    Attributes:
        name: name of the arm.
        setting: the setting with its address, such as `engine.url`; or, for a started server, `the regular command` or
            the like.
        model: the name under which it serves the model, if the user set it; None to use the name in its command, or its
            only model.
        url: its address; None if it is started here.
        pages: addresses of the pages with its counters; empty if they are at its own address.
        launch: how it is started here; None if it is running already.
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
        name: its name in messages.
        url: address of its API.

    Raises:
        RunError: if no port is free.
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
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        # The guard removes these keys from the log. If the guard has died already, `ended` gives the reason.
        with suppress(BrokenPipeError):
            self._guard.stdin.write(f"{json.dumps(keys_here())}\n".encode())

    @property
    def pid(self) -> int:
        """Process id of the guard. The guard is the ancestor of all processes of the server, except for those in a
        container.
        """
        return self._guard.pid

    @property
    def ended(self) -> str | None:
        """The reason why the server has ended, from its output; None while the guard runs. Ask before `stop`: after it,
        the guard's exit code says nothing about the server.
        """
        code = self._guard.poll()
        if code is None:
            return None
        lines = self._log or ["it wrote nothing"]
        reason = f": {lines[-1]}"
        # If a signal ended the server, the guard's exit code is 128 plus the number of the signal: 137 means SIGKILL.
        # If a signal ended the guard itself, as `pkill -f` may, the code is the negative number.
        try:
            ended_by = signal.Signals(-code if code < 0 else code - 128)
        except ValueError:
            how = f"ended with exit code {code}"
        else:
            # SGLang kills itself if one of its processes fails.
            is_own_act = any("child failed" in line for line in lines)
            meaning = None if is_own_act else _MEANT_BY_SIGNAL.get(ended_by)
            how = f"was ended by {ended_by.name}" + (f" ({meaning})" if meaning else "")
            reason = ""
        # The last line that names a reason counts. Without such a line, the last line of all counts; after a signal,
        # none does, because the last line then has nothing to do with the end.
        was_of_error = False
        for line in lines:
            is_of_error = _ERROR_OF_LLAMA_CPP.match(line) is not None
            # Of several lines of llama.cpp's level E in a row, the first is the reason, and the others are its
            # consequences.
            is_reason = not was_of_error if is_of_error else _REASON.search(line)
            was_of_error = is_of_error
            if is_reason and not _POINTS_ELSEWHERE.search(line):
                reason = f": {line}"
        return f"the {self.name} server {how}{reason} (all of it: {self._launch.log})"

    def why_ended(self) -> str | None:
        """The reason why a server that just closed a connection has ended; None if it still runs.

        The guard notices the end of the server a moment later, so this waits up to `_MOST_ENDING_S` seconds.
        """
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(_MOST_ENDING_S)
        return self.ended

    def wait_until_ready(self, say: Callable[[str], None], key: str | None) -> None:
        """Wait until the server answers.

        Args:
            say: shows a line to the user; called every 20 seconds, with the last line of the server's output.
            key: key of its API; None without one.

        Raises:
            RunError: if the server has ended, or is not ready within `Launch.timeout_s`.
            SettingError: if the server requires another key, or a key if there is none.
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
                # The 20 seconds begin now: several lines may have become due while this process waited for the other
                # server.
                next_line_s = seconds + _SAY_S
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End the server, and wait until none of its processes is left, but at most `_MOST_STOPPING_S` seconds.

        Closing the guard's standard input makes the guard end them. If the guard takes too long, it is killed itself,
        and with it the server's first process.
        """
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(_MOST_STOPPING_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    @property
    def _log(self) -> list[str]:
        """The lines of the server's output since this start; only the last lines if the output is long."""
        with self._launch.log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _MOST_OF_LOG))
            output = file.read().decode(errors="replace")
        lines = [from_outside(line) for line in output.splitlines()]
        return [line for line in lines if line]


def _with_container_id(command: list[str], file: Path) -> list[str]:
    """Add to the command of a container a file for the container's id, by which the guard can end the container. Other
    commands are returned unchanged.
    """
    names = [PurePosixPath(word).name for word in command]
    for index, name in enumerate(names):
        # `docker container run` has the flag `--cidfile`; `docker compose run` does not. Before `run` there may be one
        # option with a value, such as `--context C`.
        behind_name = names[index + 1 : index + 4]
        if name in CONTAINERS and "run" in behind_name and "compose" not in behind_name:
            # The file of an earlier start is removed, because `docker run` refuses a file that exists already.
            file.unlink(missing_ok=True)
            behind = names.index("run", index) + 1
            return [*command[:behind], "--cidfile", str(file), *command[behind:]]
    return command


def _free_port() -> int:
    """A port on which nothing listens.

    It is below the ports that Linux assigns to outgoing connections, so that no connection takes it before the server
    does.
    """
    # Not the global `random`: programs that seed it equally and run side by side would try the same ports.
    for port in random.SystemRandom().sample(_PORTS, 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RunError(
        f"no port of 127.0.0.1 is free, of 1000 that were tried from {_PORTS[0]} to {_PORTS[-1]}"
    )
