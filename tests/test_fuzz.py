"""Random settings, prompt files and signals against real command lines, and random hostile inputs: servers, heads and
files of a report. `pytest -m fuzz -n 0` runs both.

HARNESS_FUZZ_SECONDS says for how long each runs (300), HARNESS_FUZZ_SEED repeats a run. Whatever is drawn, there is no
traceback, no wrong exit code, no lost row, and no label that differs from what was measured.
"""

from __future__ import annotations

import csv
import json
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
    "draft": (
        ["tiny_draft", "none", "lookup", "suffix", "tiny"],
        ["./nowhere", "tiny_drft", "7C_8bit", "{}"],
    ),
    "draft.sampling": (["target", "greedy"], ["best"]),
    "dtype": (["float32", "auto"], ["float12"]),
    "runner": (["auto", "eager", "static"], ["graphs", "fast"]),
    "placement": (["auto", "cpu", "balanced"], ["gpu0"]),
    "placement.reserve_gb": (["0", "3.5"], ["-1", "inf"]),
    "results.file": (
        ["results/x.csv", "é=#/(x).csv", "null"],
        ["fifo", "", "/proc/x.csv", "good.txt/x.csv"],
    ),
    "nonsense": ([], ["1"]),
}
PROMPTS = {
    "good.txt": b"Once upon a time\n7 * 8 =\n\xe6\xbc\xa2\xe5\xad\x97 \x1b[31m [bold]markup[/bold]\n1 + 2 =\n",
    "good.jsonl": b'{"prompt": "Once", "category": "math [/no_think]"}\n' * 2
    + b'{"turns": ["a", "b"]}\n{"prompt": "=1+1"}\n',
    "bad.txt": b"\xff\xfe broken\n",
    "empty.jsonl": b"\n\n",
    "deep.jsonl": b'{"prompt": ' + 100_000 * b"[" + b"\n",
    "binary.jsonl": bytes(range(256)),
    "three.txt": b"one\ntwo\nthree\n",
}
BY_COMMAND: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "latency": {
        "prompts": (
            ["good.txt", "./good.jsonl", "tiny"],
            ["bad.txt", "empty.jsonl", "deep.jsonl", "binary.jsonl", "absent.txt", "three.txt"],
        ),
        "batch_size": (["1", "2", "4"], ["0", "5"]),
        "num_warmup": (["0", "2"], ["-1"]),
        "test": (["false"], ["maybe"]),
    },
    "compare": {
        "prompt": (["7 * 8 =", "a, ${x} = [b'\"", "\x1b[31m[bold]"], [" "]),
        "view": (["text", "race", "log"], ["rase"]),
        "json": (["true", "false"], ["maybe"]),
    },
    "eval": {
        "task": (["addition", "multiplication"], ["division"]),
        "batch_size": (["1", "3"], ["0"]),
    },
    "plan": {"gpus": (["1", "8"], ["0"]), "gpu_memory": (["40GB", "1TiB"], ["40", "much"])},
    "recovery": {"prompts": (["good.txt"], ["bad.txt"]), "shift": (["0.05"], ["0", "2"])},
}
FIXED = {
    "latency": ["num_prompts=4", "decoding.max_new_tokens=5"],
    "compare": ["decoding.max_new_tokens=5"],
    "eval": ["num_prompts=3"],
    "plan": ["results.file=results/plan.csv"],
    "recovery": ["num_prompts=2", "num_draws=1000", "decoding.max_new_tokens=6"],
}
# Lines for `compare` from a pipe: prompts, what is none, and what fails.
LINES = [
    "7 * 8 =",
    "Once upon\ta time",
    "\x1b[31m",
    "\udcff",
    "",
    "  ",
    ":set view=log",
    ":quit",
    ":hlp",
    ":set top_p=2",
]
FAILING = (":hlp", ":set top_p=2")
# The settings that a sweep varies, so that no two of its jobs are the same measurement.
SWEPT = {"seed": ["1", "2"], "decoding.temperature": ["0.5", "1"]}
# With which labels in the row the settings must agree.
LABELS = [
    "seed",
    "decoding.temperature",
    "decoding.top_k",
    "decoding.top_p",
    "decoding.rule",
    "batch_size",
]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@dataclass
class Case:
    """A command line, and whether a part of it is wrong.

    `swept` is the setting with two values, of a sweep; `lines` come from a pipe.
    """

    command: str
    settings: dict[str, str] = field(default_factory=dict)
    wrong: bool = False
    swept: str | None = None
    lines: list[str] = field(default_factory=list)
    number: int | None = None
    delay: float = 0.0

    @property
    def arguments(self) -> list[str]:
        fixed = [
            word for word in FIXED[self.command] if word.partition("=")[0] not in self.settings
        ]
        sweep = ["-m", f"{self.swept}={','.join(SWEPT[self.swept])}"] if self.swept else []
        return [
            self.command,
            *fixed,
            *sweep,
            *(f"{key}={value}" for key, value in self.settings.items()),
        ]

    @property
    def obeyed(self) -> list[str]:
        """The lines that are read and not blank."""
        lines = [line for line in self.lines if line.strip()]
        return lines[: lines.index(":quit")] if ":quit" in lines else lines

    @property
    def num_races(self) -> int:
        return sum(not line.startswith(":") for line in self.obeyed) + ("prompt" in self.settings)


def draw(rng: random.Random) -> Case:
    case = Case(rng.choices(["latency", "compare", "eval", "plan", "recovery"], [6, 4, 2, 1, 1])[0])
    pool = SHARED | BY_COMMAND[case.command]
    if case.command != "compare" and rng.random() < 0.2:
        case.swept = rng.choice(list(SWEPT))
        del pool[case.swept]
    for setting in rng.sample(list(pool), rng.randint(0, 5)):
        good, bad = pool[setting]
        wrong = not good or rng.random() < 0.12
        case.settings[setting] = rng.choice(bad if wrong else good)
        case.wrong |= wrong
    draft = case.settings.get("draft")
    if "gpus" in case.settings and "gpu_memory" not in case.settings:
        case.wrong = True
    if draft == "none" and "draft.sampling" in case.settings:
        del case.settings["draft.sampling"]
    if case.command == "compare" and "prompt" not in case.settings:
        case.lines = rng.choices(LINES, k=rng.randint(0, 5))
        # Without a line there is no prompt.
        case.wrong |= not any(line.strip() for line in case.lines)
    if rng.random() < 0.3:
        case.number, case.delay = rng.choice(SIGNALS), rng.uniform(0.05, 12)
    return case


def check(case: Case, directory: Path) -> str | None:
    """Run it, and say what is wrong with how it ended; None for nothing."""
    # All lines are in the file before the command reads it.
    (directory / "lines").write_bytes("\n".join(case.lines).encode(errors="surrogateescape"))
    with (directory / "lines").open("rb") as lines:
        run = subprocess.Popen(
            [sys.executable, "-m", "harness", *case.arguments],
            cwd=directory,
            stdin=lines,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    if case.number is not None:
        try:
            run.wait(case.delay)
        except subprocess.TimeoutExpired:
            run.send_signal(case.number)
    stdout, stderr = (text.decode(errors="replace") for text in run.communicate())
    code = run.returncode
    if (
        case.number is not None
        and code == -case.number
        and not list(directory.glob("*/*/*/*/**/*.csv"))
    ):
        return None  # Before Python handles signals.
    if "Traceback" in stderr or "HYDRA_FULL_ERROR" in stderr:
        return f"an unexplained error: {stderr[-2000:]}"
    if "\x1b" in stdout + stderr:
        return "escape sequences on a stream that is no terminal"
    allowed = (
        {0, 1, 3}
        if case.command == "recovery"
        else {int(any(line in FAILING for line in case.obeyed))}
    )
    if case.wrong:
        # A job of a sweep that fails has a row.
        allowed = {1, 2} if case.swept else {2}
    # Python gives its handlers back as it ends, when everything is written.
    if code not in allowed | ({130, -case.number} if case.number is not None else set()):
        return f"exit code {code}: {stderr[-2000:]}"
    if case.wrong and code != 130:
        said = [line for line in stderr.splitlines() if line.startswith("harness: ")]
        return None if len(said) == 1 or case.swept else f"not one line: {stderr}"
    if case.settings.get("json") == "true" and [
        json.loads(line)["status"] for line in stdout.splitlines()
    ] != (case.num_races * ["ok"]):
        return None if code == 130 else f"not a record for each prompt: {stdout}"
    return check_rows(case, directory, interrupted=code == 130)


def check_rows(case: Case, directory: Path, *, interrupted: bool) -> str | None:
    files = [*directory.glob("outputs/*/*/*/*.csv"), *directory.glob("multirun/*/*/*/*/*.csv")]
    runs = [read(file) for file in sorted(files) if file.name == f"{case.command}.csv"]
    statuses = {row["status"] for rows in runs for row in rows}
    # Between two races or jobs nothing is interrupted, nor is a run whose rows are being printed.
    whole = case.command != "compare" and not case.swept
    interrupted = interrupted and not (whole and statuses == {"ok"})
    if interrupted:
        if whole and list(directory.rglob("environment.json")) and statuses != {"interrupted"}:
            return f"status {statuses}"
    elif case.command == "compare":
        if sum(map(len, runs)) != case.num_races or statuses - {"ok"}:
            return f"{case.num_races} races have {runs}"
    elif len(runs) != (len(SWEPT[case.swept]) if case.swept else 1) or "interrupted" in statuses:
        return f"rows of {len(runs)} runs, with status {statuses}"
    name = case.settings.get("results.file", f"results/{case.command}.csv")
    collected = (
        set()
        if name == "null"
        else {row["run"] for row in (read(directory / name) if runs else [])}
    )
    if name != "null" and {row["run"] for rows in runs for row in rows} - collected:
        return "a row is not among those collected"
    if name == "null" and list(directory.glob("results/*.csv")):
        return "rows are collected in spite of results.file=null"
    for file in files:
        if file.name == f"{case.command}.csv" and (
            reason := check_run(case, file, interrupted=interrupted)
        ):
            return reason
    if case.swept and not interrupted:
        column = case.swept.rpartition(".")[2]
        labels = {label_of(row, column) for rows in runs for row in rows} - {"", "all"}
        if labels and {float(str(label)) for label in labels} != set(map(float, SWEPT[case.swept])):
            return f"the jobs are labelled {labels}"
    return None


def label_of(row: dict[str, str], column: str) -> str:
    """A row's value of a setting; the greedy check of `recovery` has a temperature that nobody asked for."""
    greedy = column == "temperature" and row.get("check") == "greedy"
    return "" if greedy else row.get(column, "")


def check_run(case: Case, file: Path, *, interrupted: bool) -> str | None:
    """The first wrong label in a run's rows or in those of its prompts."""
    rows = read(file)
    for row in rows:
        for setting in LABELS:
            column = setting.rpartition(".")[2]
            asked, label = case.settings.get(setting), label_of(row, column)
            same = asked is None or label in ("", "all", asked)
            if not same and float(label) != float(str(asked)):
                return f"{setting}={asked} is labelled {label}"
    if case.command != "latency":
        return None
    prompts = (
        read(file.with_name("latency_prompts.csv"))
        if file.with_name("latency_prompts.csv").exists()
        else []
    )
    for row in rows:
        own = [prompt for prompt in prompts if prompt["arm"] == row["arm"]]
        if int(row["num_prompts"] or 0) != len(own):
            return f"{len(own)} prompts are labelled {row['num_prompts']}"
        if int(row["num_tokens"] or 0) != sum(int(prompt["num_tokens"]) for prompt in own):
            return "tokens are lost"
    return (
        "prompts are lost"
        if not interrupted and {row["num_prompts"] for row in rows} != {"4"}
        else None
    )


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def seed_and_end() -> tuple[int, float]:
    """The seed of this run, and the time at which it ends."""
    seed = int(os.environ.get("HARNESS_FUZZ_SEED") or time.time())
    return seed, time.monotonic() + float(os.environ.get("HARNESS_FUZZ_SECONDS") or 300)


@pytest.mark.fuzz
def test_nothing_that_is_drawn_breaks_it(tmp_path: Path) -> None:
    seed, ends = seed_and_end()
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
            broken.append(
                f"{case.arguments} signal={case.number} after {case.delay:.2f} s: {reason}"
            )
            print(broken[-1], flush=True)
        count += 1
    print(f"{count} command lines, seed {seed}")
    assert not broken, "\n".join([f"seed {seed}, {len(broken)} of {count}:", *broken])
