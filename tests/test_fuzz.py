"""Random settings, prompt files and signals against real command lines: `pytest -m fuzz -n 0 -s`.

HARNESS_FUZZ_SECONDS says for how long it runs (300), HARNESS_FUZZ_SEED repeats a run. Whatever is drawn, there is no
traceback, no wrong exit code, no lost row, and no label that differs from what was measured.
"""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# By setting: values that hold, and values that do not.
SHARED: dict[str, tuple[list[str], list[str]]] = {
    "seed": (["0", "7", "123456789012"], ["-1", "x", "1e3", str(2**70)]),
    "decoding.temperature": (["0", "0.5", "1", "2.5"], ["-1", "nan", "inf", "1e-30", "warm"]),
    "decoding.top_k": (["0", "5", "100000"], ["-3", "0.5"]),
    "decoding.top_p": (["1", "0.9", "0.01"], ["0", "1.1", "[]"]),
    "decoding.num_draft_tokens": (["1", "2", "9"], ["0", "1000000000000", "true"]),
    "decoding.rule": (["deepmind", "google", "block", "typical"], ["", "deep mind", "漢"]),
    "draft": (["tiny_draft", "none", "lookup", "tiny_eagle3"], ["./nowhere", "tiny_drft", "{}"]),
    "dtype": (["float32", "auto"], ["float12"]),
    "runner": (["auto", "eager", "static"], ["graphs", "fast"]),
    "placement": (["auto", "cpu", "balanced"], ["gpu0"]),
    "placement.reserve_gb": (["0", "3.5"], ["-1", "inf"]),
    "results.file": (["results/x.csv", "é=#/(x).csv"], ["fifo", "/proc/x.csv", "good.txt/x.csv"]),
    "nonsense": ([], ["1"]),
}
PROMPTS = {
    "good.txt": "Once upon a time\n7 * 8 =\n漢字 \x1b[31m [bold]markup[/bold]\n1 + 2 =\n".encode(),
    "good.jsonl": b'{"prompt": "Once", "category": "math [/no_think]"}\n' * 2
    + b'{"turns": ["a", "b"]}\n{"prompt": "=1+1"}\n',
    "bad.txt": b"\xff\xfe broken\n",
    "empty.jsonl": b"\n\n",
    "deep.jsonl": b'{"prompt": ' + 100_000 * b"[" + b"\n",
    "three.txt": b"one\ntwo\nthree\n",
}
BY_COMMAND: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "latency": {
        "prompts": (
            ["good.txt", "./good.jsonl", "tiny"],
            ["bad.txt", "empty.jsonl", "deep.jsonl", "absent.txt", "three.txt"],
        ),
        "batch_size": (["1", "2", "4"], ["0", "5"]),
        "num_warmup": (["0", "2"], ["-1"]),
    },
    "eval": {"operands": (["[1,9]"], ["[9,1]"]), "batch_size": (["1", "3"], ["0"])},
    "plan": {"gpu_memory": (["40GB", "1TiB"], ["40", "much"])},
}
FIXED = {
    "latency": ["num_prompts=4", "decoding.max_new_tokens=5"],
    "eval": ["num_prompts=3"],
    "plan": ["results.file=results/plan.csv"],
}
# With which labels in the row the settings must agree.
LABELS = ["seed", "decoding.temperature", "decoding.top_k", "decoding.top_p", "batch_size"]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@dataclass
class Case:
    """A command line, whether a part of it is wrong, and the signal that it gets after a while."""

    command: str
    settings: dict[str, str] = field(default_factory=dict)
    wrong: bool = False
    number: int | None = None
    delay: float = 0.0

    @property
    def arguments(self) -> list[str]:
        fixed = [word for word in FIXED[self.command] if word.split("=")[0] not in self.settings]
        return [self.command, *fixed, *(f"{key}={value}" for key, value in self.settings.items())]


def draw(rng: random.Random) -> Case:
    case = Case(rng.choices(["latency", "eval", "plan"], [6, 2, 1])[0])
    pool = SHARED | BY_COMMAND[case.command]
    for setting in rng.sample(list(pool), rng.randint(0, 5)):
        good, bad = pool[setting]
        wrong = not good or rng.random() < 0.12
        case.settings[setting] = rng.choice(bad if wrong else good)
        case.wrong |= wrong
    if rng.random() < 0.3:
        case.number, case.delay = rng.choice(SIGNALS), rng.uniform(0.05, 12)
    return case


def check(case: Case, directory: Path) -> str | None:
    """Run it, and say what is wrong with how it ended; None for nothing."""
    run = subprocess.Popen(
        [sys.executable, "-m", "harness", *case.arguments],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if case.number is not None:
        try:
            run.wait(case.delay)
        except subprocess.TimeoutExpired:
            run.send_signal(case.number)
    stdout, stderr = (text.decode(errors="replace") for text in run.communicate())
    code = run.returncode
    is_ended = case.number is not None and code in (130, -case.number)
    if is_ended and not list(directory.glob("outputs/**/*.csv")):
        return None  # Before anything was measured.
    if "Traceback" in stderr or "HYDRA_FULL_ERROR" in stderr:
        return f"an unexplained error: {stderr[-2000:]}"
    if "\x1b" in stdout + stderr:
        return "escape sequences on a stream that is no terminal"
    if not is_ended and code not in ({2} if case.wrong else {0}):
        return f"exit code {code}: {stderr[-2000:]}"
    if case.wrong and not is_ended:
        said = [line for line in stderr.splitlines() if line.startswith("harness: ")]
        return None if len(said) == 1 else f"not one line: {stderr}"
    return check_rows(case, directory, interrupted=is_ended)


def check_rows(case: Case, directory: Path, *, interrupted: bool) -> str | None:
    """The first lost row, wrong status or wrong label."""
    (file,) = directory.glob(f"outputs/*/*/*/{case.command}.csv")
    rows = read(file)
    statuses = {row["status"] for row in rows}
    # A run whose rows are being printed is no longer interrupted.
    if statuses != {"ok"} and not (interrupted and statuses == {"interrupted"}):
        return f"status {statuses}"
    collected = read(directory / case.settings.get("results.file", f"results/{case.command}.csv"))
    if {row["run"] for row in rows} - {row["run"] for row in collected}:
        return "a row is not among those collected"
    for row in rows:
        for setting in LABELS:
            asked, label = case.settings.get(setting), row.get(setting.rpartition(".")[2], "")
            if asked is not None and label not in ("", "all") and float(label) != float(asked):
                return f"{setting}={asked} is labelled {label}"
    if case.command != "latency" or statuses != {"ok"}:
        return None
    prompts = read(file.with_name("latency_prompts.csv"))
    for row in rows:
        tokens = [int(prompt["num_tokens"]) for prompt in prompts if prompt["arm"] == row["arm"]]
        if (len(tokens), sum(tokens)) != (4, int(row["num_tokens"])):
            return "prompts or tokens are lost"
    return None


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.fuzz
def test_nothing_that_is_drawn_breaks_it(tmp_path: Path) -> None:
    seed = int(os.environ.get("HARNESS_FUZZ_SEED") or time.time())
    ends = time.monotonic() + float(os.environ.get("HARNESS_FUZZ_SECONDS") or 300)
    rng = random.Random(seed)
    broken: list[str] = []
    count = 0
    while time.monotonic() < ends:
        directory = tmp_path / str(count)
        directory.mkdir()
        for name, content in PROMPTS.items():
            (directory / name).write_bytes(content)
        os.mkfifo(directory / "fifo")
        case = draw(rng)
        if reason := check(case, directory):
            signalled = f"signal={case.number} after {case.delay:.2f} s"
            broken.append(f"{case.arguments} {signalled}: {reason}")
            print(broken[-1], flush=True)
        count += 1
    print(f"{count} command lines, seed {seed}")
    assert not broken, "\n".join([f"seed {seed}, {len(broken)} of {count}:", *broken])
