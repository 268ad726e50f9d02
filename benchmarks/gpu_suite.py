"""Measures pairs of models on a GPU, tries the command line and runs tests, to check the targets of this project.

Run it first on a new GPU. With one GPU with 80 GB, call it as follows; no variables need to be exported:

    python benchmarks/gpu_suite.py --list --out DIR           # the plan, with minutes and results so far
    python benchmarks/gpu_suite.py --minutes 9 --out DIR      # what fits into 9 minutes; call it again and again
    python benchmarks/gpu_suite.py --report DIR               # the targets, and all tables, ready for RESULTS.md
    python benchmarks/gpu_suite.py --readme DIR               # fills the GPU table of README.md

The most important cases come first: the main pair and its peers, whether it is lossless, a head, number formats, tests.

A machine that is lent for minutes is empty at each call. So bring the wheels of `scripts/collect_gpu_wheels.sh`, and
keep two directories from call to call (without them, every call begins with the first case): DIR, and next to it
DIR.inductor, the compiler's cache, which saves 2 to 3 minutes of tuning for each pair. Both are archived at the end, as
DIR.tar.gz and DIR.inductor.tar.gz. If a call has ten minutes, these commands leave time for the archives:

    python -m pip install --no-index --no-deps WHEELS/*.whl
    python benchmarks/gpu_suite.py --minutes 8.5 --out results

Each case runs in its own process. Its files are:

    DIR/NAME.jsonl             results, saved after every measurement
    DIR/NAME.log               all output
    DIR/outputs, DIR/results   the files that its commands save

A case that was cut off begins again in the next call (tests and commands continue where they stopped). After two
attempts, or after a failure, it counts as done with the results that it has. --case NAME runs one case; with --again it
begins anew. Without options, the next case runs.

The pairs are in `gpu_pairs.py`. Minutes are guesses until a case has run. Without a GPU there is a small plan for the
shipped pair.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # in case harness is not installed

import common
import gpu_report
import pytest
import torch
from gpu_pairs import PEERS, Case, Lines, Save

from harness.results.environment import environment_columns
from harness.results.locked_files import replace_file

ROOT = Path(__file__).resolve().parents[1]
MOST_ATTEMPTS = 2
# A case is stopped after _PATIENCE times its guessed minutes, but not before _LEAST_PATIENCE minutes.
_PATIENCE, _LEAST_PATIENCE = 3, 10
_SECONDS_TO_SAVE = 15


class Job(Protocol):
    """A case: its name, about how many minutes it takes, and a method that measures it.

    `measure` calls `save` with all lines so far, of which the first is about the case. `done` are the lines of an
    earlier attempt that was cut off.
    """

    @property
    def name(self) -> str: ...

    @property
    def minutes(self) -> float: ...

    def measure(self, options: argparse.Namespace, save: Save, done: Lines) -> None: ...


@dataclass(frozen=True)
class Other:
    """A case that is not a pair, but tests or commands."""

    name: str
    minutes: float
    run: Callable[[Save, Lines], None]

    def measure(self, options: argparse.Namespace, save: Save, done: Lines) -> None:
        self.run(save, done)


class SavedTests:
    """A plugin of pytest that saves the outcome of each test when it ends, and skips tests that have an outcome."""

    def __init__(self, save: Save, done: Lines) -> None:
        self._save = save
        self.lines = [line for line in done if "test" in line]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {line["test"] for line in self.lines}
        items[:] = [item for item in items if item.nodeid not in known]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            self.lines.append(line)
            self._save([self.about(), *self.lines])

    def about(self) -> dict[str, Any]:
        outcomes = [line["outcome"] for line in self.lines]
        counts = (f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "skipped"))
        return {"summary": ", ".join(counts), "failed": outcomes.count("failed")}


def pytest_arguments(marks: str) -> list[str]:
    """The arguments with which pytest runs the tests with these marks, even if its plugins or packages of other tests
    are missing.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]
    # Replace the project's options, because they name plugins.
    options = ["-o", "addopts=", "--continue-on-collection-errors", "--color=no", "--durations=10"]
    return ["-v", "-m", marks, *options, *marked]


def run_tests(marks: str, save: Save, done: Lines) -> None:
    """Run the tests with these marks, without tests that have an outcome from an earlier attempt.

    Raises:
        RuntimeError: no test ran, so the case must not count as done.
    """
    os.chdir(ROOT)
    saved = SavedTests(save, done)
    exit_code = pytest.main(pytest_arguments(marks), plugins=[saved])
    if not saved.lines:
        raise RuntimeError(f"no test ran: pytest ended with {int(exit_code)}")
    nothing_left = exit_code == pytest.ExitCode.NO_TESTS_COLLECTED
    code = 0 if nothing_left and not saved.about()["failed"] else int(exit_code)
    save([saved.about() | {"exit_code": code}, *saved.lines])


def run_commands(commands: Sequence[str], save: Save, done: Lines) -> None:
    """Run commands of harness, and save a line for each. Commands that have a line already are left out.

    Args:
        commands: commands without `harness`. As in a shell, environment variables may precede a command.
    """
    lines = [line for line in done if "command" in line]
    known = {line["command"] for line in lines}
    for command in commands:
        if command in known:
            continue
        lines.append(_run_command(command))
        save([{"failed": sum(line["exit_code"] not in (0, 3) for line in lines)}, *lines])


def _run_command(command: str) -> dict[str, Any]:
    print(f"$ harness {command}", flush=True)
    words = command.split()
    variables = list(itertools.takewhile(lambda word: "=" in word, words))
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "harness", *words[len(variables) :]],
        env=with_project() | dict(variable.split("=", 1) for variable in variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line.rstrip())
    return {
        "command": command,
        "exit_code": process.wait(),
        "seconds": time.perf_counter() - began,
        "fallbacks": [line for line in said if any(words in line for words in FALLBACKS)],
        "end": said[-120:],
    }


def with_project() -> dict[str, str]:
    """An environment in which another process finds harness, whether it is installed or not."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


# Words in the output of a run that does not prepare its calls as requested.
FALLBACKS = ("it runs with runner=", "run eagerly", "captured as it is")
RANDOM = "weights=random decoding.synthetic_acceptance=0.8 dtype=bfloat16"
MAIN = f"latency model=7B draft=llama_68m {RANDOM}"
EAGLE = f"latency model=llama3.1_8B-instruct draft=llama3.1_8B-eagle3 {RANDOM} num_prompts=4"
SHARDED = f"latency model=7B_2GPUs draft=llama_68m {RANDOM} num_prompts=4"
# The cases, each with the question that it answers.
GPU_JOBS: list[Job] = [
    # How much time do compiled passes save, and how close is a step to the bandwidth floor?
    Case("7B", "llama_68m", 5),
    # Is our loop faster than that of transformers, with and without a draft, compiled in the same way?
    *(Case("7B", "llama_68m", 2, peer=name) for name in PEERS),
    # Are the calls that are timed lossless?
    Other("recovery", 2, partial(run_commands, ["recovery"])),
    # What does a head cost at the sizes of an 8B model?
    Other("eagle3", 5, partial(run_commands, [EAGLE])),
    # Are quantized targets as fast as planned?
    Case("7B_4bit", "llama_68m", 3),
    Case("7B_8bit", "llama_68m", 3),
    # Does the code that needs a GPU pass its tests?
    Other("tests", 4, partial(run_tests, "gpu and not slow")),
    # Does a target over two GPUs run, if there are two?
    Other("sharded", 3, partial(run_commands, [SHARDED])),
]
CPU_JOBS: list[Job] = [
    Other("recovery", 1, partial(run_commands, ["recovery num_draws=1000"])),
    Other("tests", 1, partial(run_tests, "gpu and not slow")),
    Other("eagle3", 1, partial(run_commands, ["latency draft=tiny_eagle3 n=2 tokens=16"])),
    Case("tiny", "tiny_draft", 2, linked=False),
    *(Case("tiny", "tiny_draft", 0.5, peer=name, linked=False) for name in PEERS[:-1]),
    Case("tiny_8bit", "tiny_draft", 2, linked=False),
]


def run(job: Job, options: argparse.Namespace, file: Path | None) -> str | None:
    """Run a case, save its result after every measurement, and print its table.

    Args:
        file: the file for the result; None to save nothing.

    Returns:
        The reason why the case failed; None if it did not.
    """
    before = None if options.again or file is None else gpu_report.read_file(file)
    began = time.perf_counter()
    latest: Lines = [{}]
    common_columns = {
        "case": job.name,
        "attempts": 1 + (before.about.get("attempts", 0) if before else 0),
        "done": False,
        **environment_columns([common.device_name()]),
    }

    def save(lines: Lines, **more: Any) -> None:
        latest[:] = lines
        seconds = {"seconds": time.perf_counter() - began}
        about = common_columns | lines[0] | seconds | more
        save_lines(file, [about, *lines[1:]])

    print(f"{job.name}: about {job.minutes:g} min", flush=True)
    # Keep the lines of an attempt that was cut off, including its first line, until this attempt saves its own.
    done, earlier = (before.lines, before.about) if before else ([], {})
    own = common_columns.keys() | {"seconds", "error"}
    save([{name: value for name, value in earlier.items() if name not in own}, *done])
    try:
        job.measure(options, save, done)
        save(latest, done=True)
        about = common_columns | latest[0]
        make_table = gpu_report.TABLES.get(job.name, gpu_report.pair_table)
        common.print_tables(make_table(about, latest[1:]))
    except Exception as exception:  # the next call continues with the next case
        # Print the traceback, because the machine may not be available again.
        traceback.print_exc()
        error = f"{type(exception).__name__}: {exception}".splitlines()[0]
        save(latest, done=True, error=error)
        return f"{job.name}: {error}"
    return None


def save_lines(file: Path | None, lines: Sequence[Mapping[str, Any]]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, "".join(json.dumps(line) + "\n" for line in lines).encode())


def run_for(minutes: float, jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Run cases one after the other, each in its own process. The first one runs in any case; a later one is left out
    if its guessed minutes exceed the time that is left.
    """
    deadline = time.monotonic() + 60 * minutes
    try:
        for job in jobs:
            left = deadline - time.monotonic()
            if job is jobs[0] or left >= 60 * job.minutes:
                run_alone(job, min(left, 60 * most_minutes(job)), options)
    finally:
        for directory in (options.out, inductor_cache(options.out)):
            directory.mkdir(parents=True, exist_ok=True)
            print(f"to take home: {shutil.make_archive(str(directory), 'gztar', directory)}")


def most_minutes(job: Job) -> float:
    """The minutes after which a case is assumed to hang and is stopped, so that the others can run."""
    return max(_LEAST_PATIENCE, _PATIENCE * job.minutes)


def inductor_cache(out: Path) -> Path:
    """The directory of compiled and tuned kernels."""
    return out.with_name(f"{out.name}.inductor")


def run_alone(job: Job, seconds: float, options: argparse.Namespace) -> None:
    """Run a case in its own process for at most this many seconds, with its output in a file."""
    numbers = [f"--prompts={options.prompts}", f"--tokens={options.tokens}", f"--out={options.out}"]
    numbers += ["--again"] if options.again else []
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"{job.name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", __file__, "--case", job.name, *numbers],
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT,
            # In this directory, the files that commands save are archived with the results.
            cwd=options.out,
            # Set for the new process only: in this process, torch has set the variable already.
            env=with_project() | {"TORCHINDUCTOR_CACHE_DIR": str(inductor_cache(options.out))},
        )
        try:
            code = process.wait(seconds)
            print(f"{job.name}: ended with {code}, see {log}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{job.name}: stopped after {seconds / 60:.1f} min, see {log}", flush=True)
        finally:
            if process.poll() is None:
                # End the process with all processes that it has started. On SIGTERM, commands save what they have
                # measured.
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(_SECONDS_TO_SAVE)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def is_due(name: str, found: Mapping[str, gpu_report.Result]) -> bool:
    """Return whether a case has no result yet, or was cut off and has attempts left."""
    if name not in found:
        return True
    about = found[name].about
    return not about["done"] and about["attempts"] < MOST_ATTEMPTS


def options_from(jobs: Mapping[str, Job]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the cases with their minutes")
    parser.add_argument("--case", choices=jobs, metavar="NAME")
    parser.add_argument("--minutes", type=float, help="run as many cases as fit")
    # Make the path absolute, because tests run in the project's directory.
    parser.add_argument("--out", type=lambda out: Path(out).resolve(), help="directory of results")
    parser.add_argument("--again", action="store_true", help="run cases even if they have a result")
    shown = "print the results in DIR as Markdown and end"
    parser.add_argument("--report", type=Path, metavar="DIR", help=shown)
    filled = "write the results in DIR into README.md and end"
    parser.add_argument("--readme", type=Path, metavar="DIR", help=filled)
    common.add_numbers(parser, prompts=8, tokens=64)
    options = parser.parse_args()
    if options.minutes is not None and options.out is None:
        parser.error("--minutes needs --out")
    return options


def main() -> None:
    # `timeout`, or a scheduler with a time limit, sends SIGTERM. Turned into an exception, the signal ends the running
    # case, too, and all results are archived.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    jobs = {job.name: job for job in (GPU_JOBS if torch.cuda.is_available() else CPU_JOBS)}
    options = options_from(jobs)
    names = [job.name for job in (*GPU_JOBS, *CPU_JOBS)]
    if options.report is not None:
        print(gpu_report.report(gpu_report.read(options.report, names)))
        return
    if options.readme is not None:
        gpu_report.fill(ROOT / "README.md", gpu_report.read(options.readme, names))
        return
    found = {} if options.out is None else gpu_report.read(options.out, jobs)
    if options.list:
        print_plan(list(jobs.values()), found)
        return
    wanted = [jobs[options.case]] if options.case else list(jobs.values())
    due = [job for job in wanted if options.again or is_due(job.name, found)]
    if not due:
        print(f"{options.case or 'every case'}: has a result in {options.out}; --again repeats it")
    elif options.minutes is not None:
        run_for(options.minutes, due, options)
    else:
        sys.exit(run(due[0], options, options.out and options.out / f"{due[0].name}.jsonl"))


def print_plan(jobs: Sequence[Job], found: Mapping[str, gpu_report.Result]) -> None:
    total, rows = 0.0, []
    for job in jobs:
        total += job.minutes
        result = "" if job.name not in found else _state(found[job.name].about)
        rows.append((job.name, f"{job.minutes:g}", f"{total:g}", result))
    common.show(
        f"cases on {common.device_name()}", ["case", "minutes\n(guess)", "in all", "result"], rows
    )


def _state(about: Mapping[str, Any]) -> str:
    if "error" in about:
        return str(about["error"])
    minutes = f"{about['seconds'] / 60:.1f} min"
    return f"done in {minutes}" if about["done"] else f"cut off after {minutes}"


if __name__ == "__main__":
    main()
