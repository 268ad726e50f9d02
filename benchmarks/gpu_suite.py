"""What to run first on a GPU: tests, pairs of models, attention and growth, against the targets they have to reach.

With one 80 GB GPU and half an hour, these calls in this order:

    python benchmarks/gpu_suite.py --list --out DIR           # the plan, with minutes and results so far
    python benchmarks/gpu_suite.py --minutes 9.5 --out DIR    # what fits into 9.5 minutes; call it three times
    python benchmarks/gpu_suite.py --report DIR               # the targets, and all tables, ready for RESULTS.md

Each case runs in its own process, and its result is DIR/NAME.jsonl. A case with a result is skipped, one that was cut
off runs again, and one that failed has a result with the reason. --case NAME runs a case (--again: once more),
no option runs the next one. The first cases say most; those behind the line in the plan are for more than half an hour.

The pairs are in `gpu_pairs.py`, attention in `attention.py`, growth in `growth.py`; `pytest -m gpu` is a case as well.
Minutes are guesses until a case has run. Without a GPU there is a small plan over the shipped pair.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import attention
import common
import gpu_report
import growth
import torch
from gpu_pairs import Case

from harness.results.environment import environment_columns
from harness.results.files import replace_file

ROOT = Path(__file__).resolve().parents[1]


class Job(Protocol):
    """A case: its name, about how many minutes it takes, and a line about all of it, then its other lines."""

    @property
    def name(self) -> str: ...

    @property
    def minutes(self) -> float: ...

    def measure(self, options: argparse.Namespace) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Other:
    """A case that is no pair."""

    name: str
    minutes: float
    run: Callable[[], list[dict[str, Any]]]

    def measure(self, options: argparse.Namespace) -> list[dict[str, Any]]:
        return self.run()


def run_tests() -> list[dict[str, Any]]:
    """All that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "--color=no"]
    ended = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = ended.stdout.strip().splitlines() or ["no output"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [
        {"case": "tests", "exit_code": ended.returncode, "summary": lines[-1]},
        *({"test": one} for one in failures),
    ]


def run_attention() -> list[dict[str, Any]]:
    on_gpu = torch.cuda.is_available()
    lines = attention.measure(
        attention.shapes(*attention.default_sizes(on_gpu).values()),
        torch.device("cuda" if on_gpu else "cpu"),
    )
    return [{"case": "attention"}, *lines]


def run_growth() -> list[dict[str, Any]]:
    """A target with 16 layers of width 1,024 on a GPU, whose cache fits at every point."""
    if torch.cuda.is_available():
        options = argparse.Namespace(
            layers=16, hidden_size=1024, device="cuda", processor_time=False
        )
        base, repeats = growth.Point(), 6
        axes = {
            "context": [1024, 4096, 16_384],
            "batch_size": [1, 16, 64],
            "num_draft_tokens": [1, 8, 16],
            "vocabulary": [128_000],
        }
    else:
        options = argparse.Namespace(layers=8, hidden_size=256, device="cpu", processor_time=True)
        base, repeats, axes = growth.QUICK, 3, {"context": [256], "batch_size": [1]}
    load = growth.loader(options)
    lines = [
        line
        for axis, values in axes.items()
        for line in growth.measure_axis(load, axis, values, base, repeats)
    ]
    return [
        {"case": "growth", "layers": options.layers, "hidden_size": options.hidden_size},
        *lines,
    ]


ATTENTION, GROWTH = Other("attention", 4, run_attention), Other("growth", 3, run_growth)
GPU_JOBS: list[Job] = [
    Case("7B", "llama_68m", 5, peers=True),
    Other("tests", 5, run_tests),
    Case("7B_8bit", "llama_68m", 3),
    Case("7B_4bit", "llama_68m", 3),
    ATTENTION,
    Case("7B", "llama_68m", 2.5, batch_size=16),
    GROWTH,
    Case("7B", "llama_68m", 2.5, batch_size=4),
    # Beyond half an hour.
    Case("7B", "llama_68m", 2.5, num_draft_tokens=8),
    Case("7B", "llama_68m", 2.5, num_draft_tokens=2),
    Case("tiny", "tiny_draft", 3, peers=True, linked=False),
    Case("7B", "llama_68m", 6, every_runner=True),
    Case("7B", "tinyllama", 6, peers=True),
    Case("13B", "7B", 7, peers=True),
    Case("llama3.1_70B_4bit", "llama3.1_8B_4bit", 9, peers=True),
]
CPU_JOBS: list[Job] = [
    Case("tiny", "tiny_draft", 2, peers=True, every_runner=True, linked=False),
    Case("tiny_8bit", "tiny_draft", 2, linked=False),
    Other("attention", 1, run_attention),
    Other("growth", 1, run_growth),
]
HALF_AN_HOUR = 30


def run(job: Job, options: argparse.Namespace, file: Path | None) -> str | None:
    """Run a case, print and save its result. Returns why it failed."""
    began, error = time.perf_counter(), None
    print(f"{job.name}: about {job.minutes:g} min", flush=True)
    try:
        about, *lines = job.measure(options)
        about |= environment_columns([common.device_name()]) | {
            "seconds": time.perf_counter() - began
        }
        common.print_tables(gpu_report.TABLES.get(job.name, gpu_report.pair_table)(about, lines))
    except Exception as exception:  # the next call goes on with the next case
        error = f"{type(exception).__name__}: {exception}".splitlines()[0]
        about, lines = (
            {"case": job.name, "error": error, **environment_columns([common.device_name()])},
            [],
        )
    save(file, [about, *lines])
    return error and f"{job.name}: {error}"


def save(file: Path | None, lines: Sequence[Mapping[str, Any]]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, "".join(json.dumps(line) + "\n" for line in lines).encode())


def run_for(minutes: float, jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Run cases one after the other, each in its own process, as long as one still fits; at least the first."""
    deadline = time.monotonic() + 60 * minutes
    numbers = [
        f"--prompts={options.prompts}",
        f"--tokens={options.tokens}",
        f"--out={options.out}",
        "--again",
    ]
    for job in jobs:
        left = deadline - time.monotonic()
        if job is not jobs[0] and left < 60 * job.minutes:
            continue
        process = subprocess.Popen(
            [sys.executable, __file__, "--case", job.name, *numbers], start_new_session=True
        )
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            print(f"{job.name}: stopped after {left / 60:.1f} min")
            if job is jobs[0]:  # with all the time that there is
                about = {"case": job.name, "error": f"not done in {left / 60:.1f} min"}
                save(
                    options.out / f"{job.name}.jsonl",
                    [about | environment_columns([common.device_name()])],
                )
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started


def main() -> None:
    jobs = {job.name: job for job in (GPU_JOBS if torch.cuda.is_available() else CPU_JOBS)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="print the cases with their minutes and end"
    )
    parser.add_argument("--case", choices=jobs, metavar="NAME")
    parser.add_argument("--minutes", type=float, help="run as many cases as fit")
    parser.add_argument("--out", type=Path, help="directory of the results")
    parser.add_argument("--again", action="store_true", help="run cases even if they have a result")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="print the results in DIR as Markdown and end"
    )
    common.add_numbers(parser, prompts=8, tokens=64)
    options = parser.parse_args()
    if options.minutes is not None and options.out is None:
        parser.error("--minutes needs --out")
    if options.report is not None:
        print(gpu_report.report(gpu_report.read(options.report, jobs)))
        return
    found = {} if options.out is None else gpu_report.read(options.out, jobs)
    if options.list:
        print_plan(list(jobs.values()), found)
        return
    wanted = [jobs[options.case]] if options.case else list(jobs.values())
    due = [job for job in wanted if options.again or job.name not in found]
    if not due:
        print(f"{options.case or 'every case'}: has a result in {options.out}; --again repeats it")
    elif options.minutes is not None:
        run_for(options.minutes, due, options)
    else:
        sys.exit(run(due[0], options, options.out and options.out / f"{due[0].name}.jsonl"))


def print_plan(jobs: Sequence[Job], found: Mapping[str, gpu_report.Result]) -> None:
    total, rows = 0.0, []
    for job in jobs:
        if total <= HALF_AN_HOUR < total + job.minutes:
            rows.append(("beyond half an hour:", "", "", ""))
        total += job.minutes
        about = found[job.name].about if job.name in found else None
        result = (
            ""
            if about is None
            else about.get("error") or f"done in {about['seconds'] / 60:.1f} min"
        )
        rows.append((job.name, f"{job.minutes:g}", f"{total:g}", result))
    common.show(
        f"cases on {common.device_name()}", ["case", "minutes\n(guess)", "in all", "result"], rows
    )


if __name__ == "__main__":
    main()
