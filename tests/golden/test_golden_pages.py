"""Whole pages of planted runs, and reports of planted files: what a reader sees, line by line.

A page that changes is a diff to be read: `pytest tests/golden -n 0 --snapshot-update` accepts it. Figures have tests
against their planted truth.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

import harness
from harness.commands.latency.table_row import table_rows
from harness.commands.report.command import build
from harness.config.command_line import Words
from harness.measuring.rows import LatencyRow
from harness.reporting.files import ReportContents, markdown, on_terminal
from harness.reporting.terminal import as_text
from harness.results.runs import Run
from in_process import Harness
from pages import without_figures
from report_files import eval_run, latency_run, over, prompt_rows, write

PLANTED = ["engine=simulated", "resume=false"]
RUNS = {
    "it pays": [],
    "it does not pay": ["K=12", "engine.acceptance=0.3"],
    "cannot tell": ["K=12", "engine.prompts_differ=1.5", "num_prompts=10"],
    "three prompts": ["num_prompts=3"],
    "without a draft": ["draft=none"],
    "answers of 4 and 60 tokens": [
        *("engine.lengths=[4,60]", "decoding.ignore_eos=false", "engine.first_ms=200"),
        "num_prompts=20",
    ],
    "two answers stall": [
        *("engine.stall_every=900", "engine.stall_ms=9000"),
        *("num_prompts=16", "seed=2"),
    ],
    "the engine slows down": ["engine.drift=0.6", "num_prompts=40"],
    "eight in flight": ["batch_size=8", "num_prompts=64"],
    "in blocks": ["engine.blocks=6", "engine.start_noise=0.05", "num_prompts=18"],
    "until it is precise": ["precision=6%"],
    "a sweep over K": ["-m", "K=1,2,4,8", "num_prompts=20"],
    "a sweep over the load": ["-m", "batch_size=1,4", "num_prompts=40"],
    "three repetitions": ["repeats=3", "num_prompts=10"],
}
# What differs from run to run, and from machine to machine.
_VOLATILE = (
    (re.compile(r"\d{8}T\d{6}(\.\d{6})?(-[0-9a-f]{6})?"), "RUN"),
    (re.compile(r"(outputs|multirun)/\w+/[\d-]+/[\d-]+"), r"\1/RUN"),
    (re.compile(r"\b\d{4}-\d{2}-\d{2}\b"), "DAY"),
    (re.compile(r"\b[0-9a-f]{40}(-dirty)?|\b[0-9a-f]{7,12}-dirty"), "COMMIT"),
    (re.compile(re.escape(harness.__version__)), "VERSION"),
)


def steady(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, word in _VOLATILE:
        text = pattern.sub(word, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_latency(harness: Harness, snapshot: SnapshotAssertion, run: str) -> None:
    outcome = harness("latency", *PLANTED, *RUNS[run], code=None)
    assert steady(outcome.stdout) == snapshot(name="short")
    assert steady(without_figures(outcome.summary)) == snapshot(name="full")


def test_a_sweep_over_the_load(harness: Harness, snapshot: SnapshotAssertion) -> None:
    outcome = harness("latency", "-m", *PLANTED, "K=1,3,5", "batch_size=1,4")
    assert steady(outcome.stdout) == snapshot


def test_a_report(harness: Harness, snapshot: SnapshotAssertion) -> None:
    harness("latency", "-m", *PLANTED, "K=2,4", "num_prompts=10")
    outcome = harness("report", "results")
    assert steady(outcome.stdout) == snapshot(name="terminal")
    page = Path("results/report.html").read_text(encoding="utf-8")
    text = re.sub(r"<(style|script|svg)\b.*?</\1>", " ", page, flags=re.DOTALL)
    lines = [" ".join(line.split()) for line in re.sub(r"<[^>]+>", "\n", text).splitlines()]
    # Behind these is the machine.
    about_runs = filter(None, lines[: lines.index("Environment")])
    assert steady("\n".join(about_runs)) == snapshot(name="html")


SURE = {"speedup_covers": over(15)}
FEW = {"num_prompts": 3, "speedup_low": None, "speedup_high": None, "speedup_covers": over(3)}
MADE_UP = {"engine": "simulated", "model": "simulated", "devices": None, "dtype": None}
STOPPED = {"status": "interrupted", "error": "by Ctrl-C", "ms_per_token": 1.0}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Words.divide(["report"]).note()


def shown(report: ReportContents) -> str:
    return steady(as_text(on_terminal(report), 140))


def test_an_afternoon(directory: None, snapshot: SnapshotAssertion) -> None:
    """Runs as somebody tries them: a sweep over K, other prompts and targets, some without a verdict, made-up ones."""
    runs: list[list[LatencyRow]] = [
        *(latency_run(k, speedup, **SURE) for k, speedup in ((2, 1.5), (4, 2.0), (8, 1.8))),
        *(latency_run(k, 1.4, temperature=0.0, **SURE) for k in (2, 4)),
        latency_run(prompts="mine", prompts_digest="1", **SURE),
        latency_run(prompts="chats", prompts_digest="2", **SURE),
        *(latency_run(k, prompts="chats", prompts_digest="2", chat_template="never", **SURE) for k in (2, 4)),
        latency_run(model="13B_8bit", quantization="8bit", **SURE),
        latency_run(draft=None, model="30B"),
        latency_run(**FEW),
        latency_run(8, 3.0, num_prompts=2, **STOPPED),
        latency_run(model="refused", status="no_verdict", error="the regular server drafts", ms_per_token=1.0),
        *(latency_run(status="failed", error="no room", model="65B") for _ in range(2)),
        *(latency_run(k, 3.0, **SURE, **MADE_UP) for k in (2, 4)),
        latency_run(synthetic_acceptance=0.8, **SURE),
    ]  # fmt: skip
    report = build([write(Path("latency.csv"), *runs)])
    assert shown(report) == snapshot
    parts = report.pages["Is it faster?"].parts
    assert [[line.style for line in part.finding] for part in parts] == snapshot(name="styles")


def test_files_of_many_runs(directory: None, snapshot: SnapshotAssertion) -> None:
    """A run in two files, a repeated one, drafts of two checkouts, published pairs, categories, and damaged files."""
    twice = latency_run()
    checkouts: list[dict[str, Any]] = [
        {"draft_repository": f"/{place}/shipped/tiny_draft", "draft_method": "model"}
        for place in "ab"
    ]
    write(
        Path("results/latency.csv"),
        twice,
        *(latency_run(speedup=speedup, measurement="feed", draft="3B") for speedup in (2.2, 2.0)),
        *(latency_run(k, 1.5, draft="1B", **checkout) for k, checkout in zip((2, 8), checkouts, strict=True)),
        latency_run(4, 1.7, draft="./my_method.py:MyMethod", model="./models/mine/"),
        latency_run(4, 1.9, model="30B"),
        latency_run(4, 1.4, model="gpt2-xl", draft="gpt2"),
        latency_run(4, 2.0, model="./30B"),
        latency_run(model="65B", draft=None, quantization="8bit"),
        latency_run(4, 1.9, model="65B", **STOPPED),
    )  # fmt: skip
    run = Path("outputs")
    write(run / "latency.csv", twice)
    times = [("code", 50.0)] * 2 + [("code", 40.0)] * 2 + [("chat", 80.0)]
    write(run / "latency_prompts.csv", prompt_rows(twice, times))
    torn = write(Path("torn/latency.csv"), latency_run(model="whole"), latency_run(model="torn"))
    torn.write_bytes(torn.read_bytes().replace(b"100.0", b"fast", 1)[:-160])
    Path("torn/eval.csv").write_text("not,ours\n1,2\n")
    Path("torn/recovery.csv").touch()
    assert steady(markdown(build([Path()]), "")) == snapshot


def test_no_run_with_a_verdict(directory: None, snapshot: SnapshotAssertion) -> None:
    runs = [latency_run(2, 1.5, **FEW), latency_run(4, 2.0, **FEW), latency_run(8, 3.0, **STOPPED)]
    failed = write(Path("eval.csv"), eval_run(seeds=(0,), status="failed", error="no room"))
    report = build([write(Path("latency.csv"), *runs), failed])
    assert all(row.faint for row in report.pages["Without a verdict"].tables[0].rows)
    assert shown(report) == snapshot


LLAMA = "llama-server -m Qwen3.gguf --host 127.0.0.1 --port '{port}' --metrics"
DRAFTS = (
    "llama-server -m Qwen3.gguf --spec-type draft-mtp --host 127.0.0.1 --port '{port}' --metrics"
)
LLAMA_CPP: dict[str, Any] = {
    "engine": "server", "server": "llama.cpp b10434, 1 slot", "server_command": [LLAMA, DRAFTS], "model": "Qwen3.gguf",
    "draft": "draft-mtp", "draft_method": "draft-mtp", "tokens_per_iteration": 2.5, "url": None,
}  # fmt: skip
# Of the row of a table to which others add theirs.
CHANGES: list[dict[str, Any]] = [
    {},
    {"speedup_covers": over(15)},
    {"speedup_low": None, "speedup_high": None},
    {"status": "no_verdict", "error": "x", "speedup": None},
    {"status": "interrupted", "dtype": None, "temperature": None},
    {"processor_share": 0.5, "draft": "org/head", "draft_method": "eagle3"},
    {"draft": "server", "draft_method": None, "model": "a|b"},
    {"engine": "local", "server": None, "server_command": None, "commit": None},
    {"server_command": ["vllm serve A --x '{\"a|b\": 1}' --host 127.0.0.1 --port '{port}'"]},
    {"server_command": ["docker run -p '{port}:8000' vllm/vllm-openai"]},
    {"server_command": ["vllm serve '`A`'"]},
    {"server_command": ["vllm serve 'a; b'"]},
]


def test_rows_of_a_table(snapshot: SnapshotAssertion) -> None:
    runs = []
    for changes in CHANGES:
        regular, speculative = latency_run(2, 1.5, **LLAMA_CPP)
        runs.append(Run([regular, speculative.from_values(speculative.values() | changes)]))
    assert steady("\n".join(table_rows(runs))) == snapshot
