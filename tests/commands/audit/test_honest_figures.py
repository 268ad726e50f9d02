"""Honest figures and figures with planted edits: the first are not accused, the others found."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import audit as benchmark
from harness.commands.audit.command import main
from harness.commands.audit.rows import stated_rows
from harness.config.command_line import Words
from harness.config.errors import VerdictError

ROOT = Path(__file__).parents[3]


def test_planted_edits_are_found() -> None:
    """All speed-ups above the tokens per iteration, and some others."""
    found = benchmark.found_edits(25, seed=2)
    assert found["too_fast"] == 25
    assert sum(found.values()) >= 45, found


def test_honest_figures_of_11_layouts_are_hardly_accused() -> None:
    """A twentieth differs, below 0.5 % unlikely, none impossible: means, medians and sums of short and long answers."""
    verdicts, accused = benchmark.judged_tables(480)
    assert verdicts["impossible"] == 0, accused
    assert verdicts["unlikely"] <= 2, accused
    assert verdicts["differs"] <= 30, accused


# What authors published of an iteration, three of whom timed it and a plain step: github.com, read in November 2026.
THEIR_STEPS = [
    # antirez/ds4, issue 468
    ("K=1 length=1.33 speedup=1.065x", 1.25),
    # ml-explore/mlx-lm, pull request 990
    ("K=1 speed=24.09 length=1.838 baseline=15.58", 1.19),
    # lablup/mlxcel, docs/benchmark_results/speculative-pairing-gb10-2026-07-10.md
    ("K=1 speed=11.1 acceptance=55.6% baseline=14.5", 2.0),
    ("K=3 speed=7.6 acceptance=35.0% baseline=14.5", 3.9),
    # ashalliants/ninfer-3090, pull request 73
    ("K=3 speed=59.1 length=2.55 baseline=39.07", 1.68),
    ("K=4 speed=59.5 length=2.95 baseline=39.07", 1.94),
    ("K=5 speed=59.2 length=3.07 baseline=39.07", 2.03),
    ("K=6 speed=50.0 length=2.97 baseline=39.07", 2.32),
    ("K=7 speed=48.2 length=2.93 baseline=39.07", 2.38),
    ("K=8 speed=47.1 length=3.45 baseline=39.07", 2.86),
    # lvyufeng/PocketLLM, pull request 60
    ("K=5 acceptance=100% speed=5.76 baseline=3.30", 3.44),
    ("K=5 acceptance=82.5% speed=4.92 baseline=3.30", 3.44),
    ("K=5 acceptance=40% speed=2.88 baseline=3.30", 3.44),
    ("K=5 acceptance=17.5% speed=1.80 baseline=3.30", 3.44),
    # Pushkinist/rMLX, issue 496
    ("acceptance=0.877 length=2.65 speedup=1.36x", 1.95),
    ("acceptance=0.728 length=2.26 speedup=1.23x", 1.84),
    ("acceptance=0.895 length=3.41 speedup=1.34x", 2.55),
    ("acceptance=0.731 length=3.3 speedup=1.90x", 1.74),
]


@pytest.mark.parametrize(("typed", "steps"), THEIR_STEPS)
def test_costs_that_authors_published_are_found(typed: str, steps: float) -> None:
    words = dict(word.split("=") for word in typed.split())
    (row,) = stated_rows({name: [text] for name, text in words.items()})
    assert row.iterations[0].steps.middle == pytest.approx(steps, rel=0.05)


def test_the_documentation_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\n\$ harness audit ((?:.*\\\n)*.*)\n((?:.*\n)*?)```", text)
    assert blocks
    for typed, output in blocks:
        with contextlib.suppress(VerdictError):
            main(Words(shlex.split(typed.replace("\\\n", " "))))
        lines = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
        assert lines == output.rstrip().splitlines(), typed
