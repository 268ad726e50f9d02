"""A session: its rows, how long work still takes, which answers a reference is for; and was the machine quiet?"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from harness.commands.plan.record import PlanSettings
from harness.config.engines import EngineSettings
from harness.config.errors import RunError
from harness.measuring import progress as progress_module
from harness.measuring import quietness
from harness.measuring.progress import duration_in_words, progress
from harness.measuring.quietness import Quietness, processor_time
from harness.measuring.references import References
from harness.measuring.session import Session
from harness.servers.settings import ServerSettings
from some_settings import settings_of


@pytest.fixture
def session(tmp_path: Path) -> Session:
    settings = settings_of(PlanSettings, draft=None, weights="random")
    return Session(SimpleNamespace(settings=settings), settings, tmp_path)


def test_a_failure_is_noted_even_where_explaining_it_fails(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with status ok and no prompt were written where an import failed."""

    def no_module(exception: BaseException) -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr("harness.config.failures.as_run_error", no_module)
    with pytest.raises(ModuleNotFoundError), session.watch():
        raise ValueError("what  is\nwrong")
    assert (session.status, session.error) == ("failed", "what is wrong")


def test_a_panic_of_the_tokenizers_is_one_line(session: Session) -> None:
    """It is no `Exception`. A tokenizer.json may have such a regular expression."""
    split = Split(Regex("(a+)+$|([a-z ]+)*x"), "isolated")
    with pytest.raises(RunError) as failed, session.watch():
        split.pre_tokenize_str("once upon a time there was a lazy puppy")
    assert str(failed.value).startswith("the tokenizer's library panicked: Onig: Regex search")
    assert (session.status, session.error) == ("failed", str(failed.value))
    with pytest.raises(SystemExit), session.watch():
        raise SystemExit


def test_the_bar_says_what_is_left_after_the_step_behind_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    times = [0.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: times[-1]))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    # The terminal of stdout has 80 columns, and that of stderr has 55.
    monkeypatch.setattr(
        "os.get_terminal_size", lambda fd: os.terminal_size((80 if fd == 1 else 55, 24))
    )
    with progress("drawing", 22) as advance:
        for seconds in (500.0, 530.0):
            times.append(seconds)
            advance(None)
    shown = capfd.readouterr().err
    assert "1/22 · drawing" in shown
    assert shown.count("minutes") == 1
    assert "2/22 · drawing · about 10 minutes\r" in shown  # of `about 10 minutes left`
    assert [duration_in_words(seconds) for seconds in (40, 600, 9000)] == [
        "40 s",
        "10 minutes",
        "2.5 hours",
    ]


URL = "http://localhost:8000/v1"
GRAMMAR = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("settings", "is_for_texts"),
    [
        (EngineSettings(), True),
        (ServerSettings(url=URL), True),
        # The model's distribution after a text is none of the chat that a server makes of it.
        (ServerSettings(url=URL, chat=True), False),
        (ServerSettings(url=URL, extra=GRAMMAR), False),
    ],
)
def test_a_reference_is_for_what_the_model_read(
    settings: EngineSettings, is_for_texts: bool
) -> None:
    own = object()
    engine: Any = SimpleNamespace(weights=SimpleNamespace(reference=own))
    run: Any = SimpleNamespace(engine=settings)
    planned: Any = None
    references = References(run, planned, engine)
    assert references.for_texts() is (own if is_for_texts else None)


def test_processor_time_is_that_of_all_threads(tmp_path: Path) -> None:
    for thread, schedstat in (("1", "30 10 5"), ("2", "20 5 9")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(schedstat)
    (tmp_path / "has_ended").mkdir()
    assert processor_time(tmp_path) == (50, 15)
    assert processor_time(tmp_path / "another_system") is None


def test_what_a_run_has_started_computes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a server that waits for others are those that matter."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        times = {os.getpid(): (1, 2), child.pid: (10, 20)}
        by_path = {Path(f"/proc/{pid}/task"): time for pid, time in times.items()}
        monkeypatch.setattr(quietness, "processor_time", by_path.get)
        assert quietness._times_of(quietness._processes_of_run()) == times
        child.communicate()


def test_processes_that_end_between_looks_keep_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[list[dict[int, tuple[int, int]]], float | None]] = [
        # A process runs for 20 and waits for 80.
        ([{1: (30, 80)}], 0.2),
        ([{1: (30, 0)}], 1.0),
        # Its threads ended, and took their times with them.
        ([{1: (30, -1)}], None),
        ([{1: (5, 5)}], None),
        ([{}], None),
        # Servers run for 20, and for 10 beside 30 of waiting. They have ended at the next look.
        ([{1: (10, 0), 2: (20, 0)}, {1: (10, 0), 3: (10, 30)}, {1: (10, 0)}], 0.5),
    ]
    for looks, share in cases:
        times = iter([{1: (10, 0)}, *looks])
        monkeypatch.setattr(quietness, "_times_of", lambda pids, times=times: next(times))
        watch = Quietness(())
        for _ in looks:
            watch.look()
        assert watch.columns["processor_share"] == share


class Nvml:
    """A GPU whose clock falls by heat, with a neighbour."""

    NVMLError = Exception
    NVML_CLOCK_SM = 1
    clock = 1980
    pids = (os.getpid(), 1)

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlDeviceGetHandleByUUID": lambda gpu: gpu,
            "nvmlDeviceGetClockInfo": lambda handle, kind: self.clock,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: (
                0x41 if self.clock < 1500 else 0x1
            ),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=pid) for pid in self.pids
            ],
        }[name]


def test_the_worst_that_a_gpu_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, watch = Nvml(), Quietness(["GPU-aaaa"])
    monkeypatch.setattr(quietness, "pynvml", nvml)
    for clock in (1980, 1200, 1980):
        nvml.clock = clock
        watch.look()
    columns = watch.columns
    assert columns["lowest_gpu_clock_mhz"] == 1200
    assert columns["gpu_throttled"] == "temperature (hardware)"
    assert columns["num_throttled_units"] == 1
    assert columns["other_gpu_processes"] == 1

    # Processes of the run itself are no others.
    def num_others(*pids: int) -> int | None:
        nvml.pids = (os.getpid(), *pids)
        watch = Quietness(["GPU-aaaa"])
        watch.look()
        number: int | None = watch.columns["other_gpu_processes"]
        return number

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        assert num_others(server.pid) == 0
        server.communicate()
    assert num_others(os.getppid()) == 1
