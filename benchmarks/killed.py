"""Is any process left when `harness latency -- COMMAND` is killed (SIGKILL) at a random moment?

    python benchmarks/killed.py -- llama-server -m tiny.gguf -md tiny_draft.gguf --spec-type draft-simple

Prints for each run the moment, the processes just before, and those left after 10 seconds (and ends them).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid

import psutil

# In the environment of all processes of a run.
MARK = "KILLED_BENCHMARK"
WAIT_S = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--latest", type=float, default=30, help="seconds after the start")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    draws = random.Random(0)
    num_with_left = 0
    for _ in range(options.runs):
        moment = draws.uniform(0, options.latest)
        num_before, left = killed(options.command, moment)
        num_with_left += bool(left)
        names = ", ".join(process.name() for process in left) or "none"
        print(f"killed after {moment:5.1f} s, {num_before} processes; left: {names}", flush=True)
        for process in left:
            process.kill()
    print(f"{num_with_left} of {options.runs} runs left a process")


def killed(command: list[str], moment: float) -> tuple[int, list[psutil.Process]]:
    """The number of processes just before the kill, and those that are left."""
    mark = uuid.uuid4().hex
    environment = os.environ | {MARK: mark}
    line = [sys.executable, "-m", "harness", "latency", "num_prompts=500", "--", *command]
    with tempfile.TemporaryDirectory() as directory:
        started = subprocess.Popen(
            line,
            cwd=directory,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moment)
        num_before = len(marked(mark))
        started.kill()
        started.wait()
        deadline = time.monotonic() + WAIT_S
        while (left := marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
    return num_before, left


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


if __name__ == "__main__":
    main()
