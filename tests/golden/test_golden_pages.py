"""Whole pages of planted runs, short and full: what a reader sees, line by line.

A page that changes is a diff to be read: `pytest tests/golden -n 0 --snapshot-update` accepts it. Figures have tests
against their planted truth.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import harness
from in_process import Harness

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
    assert steady(outcome.summary) == snapshot(name="full")


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
