"""The life of a server that the harness starts: it gets a free port, its output goes to a file, it becomes ready or
fails with a reason, and it is ended however this process ends (`guard`).
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
# Seconds between two checks whether a server is ready, and between two lines about that.
_LOOK_S = 0.1
_SAY_S = 20.0
# Longer than the guard takes to kill everything that does not end by itself.
_MOST_STOPPING_S = 30.0
# A server's end is noticed within this many seconds.
_MOST_ENDING_S = 2.0
_MOST_OF_LOG = 4_000_000
# Lines that may give the reason why a server ended. The last lines of vLLM and llama.cpp only point to a line above,
# and `"POST /v1/completions HTTP/1.1" 500 Internal Server Error` is one of uvicorn's lines about each request.
_REASON = re.compile(
    r"\w*(error|exception|out of memory|cannot|failed|died unexpectedly)\b", re.IGNORECASE
)
# llama.cpp's lines with the level of errors, such as `0.00.015.367 E llama_prepare_model_devices: ...`.
_ERROR_OF_LLAMA_CPP = re.compile(r"[\d.]+ E ")
_POINTS_ELSEWHERE = re.compile(
    r"see root cause above|traceback|failed core proc|\braise \w+\(|exiting due to| HTTP/\d\.\d\" \d{3}",
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
        log: the file that the server's output is appended to.
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
    """Where the server of an arm is.

    Attributes:
        name: name of the arm.
        setting: the setting that holds its address, such as `engine.url`; or `the regular command`.
        model: the name under which it serves the model, as typed; None for its only one.
        url: its address; None if it is started here.
        pages: addresses of its counters, if they are not below its own address.
        launch: how it is started here; None if it runs already.
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
        url: address of its API.
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
        # The guard removes these keys from the log. If the guard died at once, `ended` gives the reason.
        with suppress(BrokenPipeError):
            self._guard.stdin.write(f"{json.dumps(sorted(keys_here()))}\n".encode())
            self._guard.stdin.flush()

    @property
    def pid(self) -> int:
        """Id of the guard, which is the ancestor of all the server's processes, except for those of a container."""
        return self._guard.pid

    @property
    def ended(self) -> str | None:
        """Why it has ended, from its output; None while it runs."""
        code = self._guard.poll()
        if code is None:
            return None
        # If a signal ended the server, the guard exits with 128 plus its number: 137 means SIGKILL.
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
            # The first of several errors in a row is the reason; the others are its consequences.
            is_reason = not was_error if is_error else _REASON.search(line)
            was_error = is_error
            if is_reason and not _POINTS_ELSEWHERE.search(line):
                reason = line
        return f"the {self.name} server {how}: {reason} (all of it: {self._launch.log})"

    def why_ended(self) -> str | None:
        """Why a server that just closed a connection has ended; None if it still runs. Its guard notices the end a
        moment later, which this waits for.
        """
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(_MOST_ENDING_S)
        return self.ended

    def wait_until_ready(self, say: Callable[[str], None], key: str | None) -> None:
        """Wait until the server answers.

        Args:
            say: shows a line from time to time if that takes long, with the last line of the server's output.
            key: key of its API; None without one.

        Raises:
            RunError: if it has ended, or is not ready in time.
            SettingError: if it requires a key.
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
                # Counted from now, because several lines may have been due while the other server was waited for.
                next_line_s = seconds + _SAY_S
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End the server, and wait until none of its processes is left. The guard ends them when its own input
        closes.
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
        """The lines of the server's output since its start; of a long output the last lines."""
        with self._launch.log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _MOST_OF_LOG))
            output = file.read().decode(errors="replace")
        lines = [from_outside(line) for line in output.splitlines()]
        return [line for line in lines if line]


def _with_container_id(command: list[str], file: Path) -> list[str]:
    """The command of a container, with a file for the container's id, by which the guard can end it."""
    names = [PurePosixPath(word).name for word in command]
    for index, name in enumerate(names):
        # `docker container run` has the flag `--cidfile`; `docker compose run` does not.
        behind_name = names[index + 1 : index + 4]
        if name in CONTAINERS and "run" in behind_name and "compose" not in behind_name:
            # The file of an earlier start is removed, because `docker run` refuses a file that exists.
            file.unlink(missing_ok=True)
            behind = names.index("run", index) + 1
            return [*command[:behind], "--cidfile", str(file), *command[behind:]]
    return command


def _free_port() -> int:
    """A port that nothing listens on. It is below those that Linux gives to outgoing connections, one of which might
    soon take it.
    """
    # A random source of its own: programs that seed `random` alike and run side by side would try the same ports.
    for port in random.SystemRandom().sample(_PORTS, 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RunError(
        f"no port of 127.0.0.1 is free, of 1000 that were tried from {_PORTS[0]} to {_PORTS[-1]}"
    )
