"""Signals end a run whenever they come, and whatever swallows exceptions."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from harness.cli import signals
from harness.config.errors import RunError
from harness.measuring.session import Session
from harness.results.schema import RunRow
from in_process import Harness, results
from processes import end, start

ROOT = Path(__file__).parents[2]
QUICK = ["latency", "engine=simulated", "num_prompts=2", "decoding.max_new_tokens=4"]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def interruption(*steps: Callable[[], object]) -> str:
    """Take the steps, which a signal must interrupt; the reason that it gives."""

    def take() -> None:
        with signals.interrupting():
            for step in steps:
                step()

    with pytest.raises(KeyboardInterrupt) as interrupt:
        take()
    return str(interrupt.value)


def wait() -> None:
    time.sleep(900)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, "stopped by SIGTERM"),
        (signal.SIGHUP, "stopped by SIGHUP"),
        (signal.SIGUSR2, "time limit: stopped by SIGUSR2"),
    ],
)
def test_a_signal_interrupts_with_its_reason(number: int, reason: str) -> None:
    before = signal.getsignal(number)
    assert interruption(signals.raise_postponed, lambda: send(number), wait) == reason
    assert signal.getsignal(number) is before


@pytest.fixture
def submitit(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """The numbers of signals that a handler such as submitit's got, before it raised an error of its own."""
    received: list[int] = []

    def give_up(number: int, _: object) -> None:
        received.append(number)
        raise ValueError("Job not requeued because: timed-out too many times.")

    before = signal.signal(signal.SIGUSR2, give_up)
    yield received
    assert signal.getsignal(signal.SIGUSR2) is give_up
    signal.signal(signal.SIGUSR2, before)


def test_a_time_limit_of_submitit_interrupts_and_fails_its_job_alone(submitit: list[int]) -> None:
    interrupted_by: list[BaseException] = []

    def measure() -> None:
        try:
            send(signal.SIGUSR2)
            wait()
        except KeyboardInterrupt as interrupt:
            interrupted_by.append(interrupt)
            raise

    limited = signals.within_time_limit()
    with pytest.raises(RunError, match="time limit: stopped by SIGUSR2"), limited:
        measure()
    assert submitit == [signal.SIGUSR2]
    assert isinstance(interrupted_by[0], signals.TimeLimit)


def test_a_signal_during_an_import_is_obeyed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swallows_everything.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1)\n"
        "except BaseException: pass\n"
        "imported = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lost: list[str] = []
    reason = interruption(
        lambda: signals.load("swallows_everything"), lambda: lost.append("the signal")
    )
    assert (reason, lost) == ("stopped by SIGTERM", [])
    assert sys.modules.pop("swallows_everything").imported, "an import is never cut short"


@pytest.mark.parametrize(
    ("command", "library", "number"),
    [("latency", "torch", signal.SIGINT), ("report", "jinja2", signal.SIGTERM)],
)
def test_a_command_that_still_imports_ends_at_once(
    tmp_path: Path, command: str, library: str, number: int
) -> None:
    """The library of this test never ends its import, and swallows every exception."""
    module = "import pathlib, time\npathlib.Path('importing').touch()\nwhile True:\n"
    module += "    try: time.sleep(900)\n    except BaseException: pass\n"
    (tmp_path / f"{library}.py").write_text(module)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = start(command, cwd=tmp_path, until="importing", PYTHONPATH=path)
    stdout, stderr = end(run, number, 130)
    assert stdout == ""
    assert stderr.splitlines()[-1] == "harness: interrupted; anything measured so far is kept"
    assert len(stderr.splitlines()) == (2 if command == "latency" else 1)


def test_a_second_signal_does_not_wait() -> None:
    interrupt = functools.partial(send, signal.SIGINT)
    reached: list[int] = []
    interruption(interrupt, lambda: reached.append(1), interrupt, lambda: reached.append(2))
    assert reached == [1]


class Swallows:
    """Python ignores what is raised while an object is destroyed."""

    def __del__(self) -> None:
        send(signal.SIGTERM)
        time.sleep(0.01)


def test_a_signal_during_a_destructor_is_not_lost() -> None:
    assert interruption(signals.raise_postponed, Swallows, wait) == "stopped by SIGTERM"


def test_a_signal_waits_while_rows_are_written(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is often pressed twice."""
    write = Session.write_rows

    def write_interrupted(session: Session, rows: Sequence[RunRow]) -> str | None:
        send(signal.SIGINT)
        return write(session, rows)

    monkeypatch.setattr(Session, "write_rows", write_interrupted)
    outcome = harness(*QUICK, code=130)
    assert outcome.stderr.endswith("interrupted; anything measured so far is kept\n")
    assert list(results().status) == ["ok", "ok"]


def test_a_second_signal_does_not_wait_for_rows() -> None:
    def write() -> None:
        with signals.finishing():
            send(signal.SIGINT)
            send(signal.SIGTERM)
            wait()

    assert interruption(signals.raise_postponed, write) == "stopped by SIGTERM"


def test_a_signal_is_not_lost_if_rows_cannot_be_written() -> None:
    """The error may end a job alone, and what called for it goes on."""
    jobs: list[int] = []

    def fail_to_write() -> None:
        jobs.append(1)
        with contextlib.suppress(OSError), signals.finishing():
            send(signal.SIGTERM)
            raise OSError("No space left on device")

    next_job = (signals.raise_postponed, lambda: jobs.append(2))
    assert interruption(signals.raise_postponed, fail_to_write, *next_job) == "stopped by SIGTERM"
    assert jobs == [1]


def test_ctrl_c_while_it_begins_to_import_is_one_line(tmp_path: Path) -> None:
    script = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "harness.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from harness.__main__ import main
main()
"""
    command = [sys.executable, "-c", script, "latency"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "harness: interrupted\n")
