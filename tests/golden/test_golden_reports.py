"""Whole reports of planted files, and the tables of runs: what becomes of many runs, and of damaged ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from harness.commands.latency.table_row import table_rows
from harness.commands.report.command import build
from harness.config.command_line import Words
from harness.measuring.rows import LatencyRow
from harness.reporting.files import ReportContents, markdown, on_terminal
from harness.reporting.terminal import as_text
from harness.results.runs import Run
from report_files import eval_run, latency_run, over, prompt_rows, write

SURE = {"speedup_covers": over(15)}
FEW = {"num_prompts": 3, "speedup_low": None, "speedup_high": None, "speedup_covers": over(3)}
PLANTED = {"engine": "simulated", "model": "simulated", "devices": None, "dtype": None}
STOPPED = {"status": "interrupted", "error": "by Ctrl-C", "ms_per_token": 1.0}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Words.divide(["report"]).note()


def without_ids(text: str) -> str:
    return re.sub(r"\d{8}T\d{6}\.\d{6}-abcdef", "RUN", text)


def shown(report: ReportContents) -> str:
    return without_ids(as_text(on_terminal(report), 140))


def test_an_afternoon(snapshot: SnapshotAssertion) -> None:
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
        *(latency_run(k, 3.0, **SURE, **PLANTED) for k in (2, 4)),
        latency_run(synthetic_acceptance=0.8, **SURE),
    ]  # fmt: skip
    assert shown(build([write(Path("latency.csv"), *runs)])) == snapshot


def test_files_of_many_runs(snapshot: SnapshotAssertion) -> None:
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
    torn.write_bytes(torn.read_bytes()[:-160])
    Path("torn/eval.csv").write_text("not,ours\n1,2\n")
    Path("torn/recovery.csv").touch()
    assert without_ids(markdown(build([Path()]), "")) == snapshot


def test_no_run_with_a_verdict(snapshot: SnapshotAssertion) -> None:
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
    "engine": "server", "server": "llama.cpp b10434", "server_command": [LLAMA, DRAFTS], "model": "Qwen3.gguf",
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
    assert without_ids("\n".join(table_rows(runs))) == snapshot
