"""Which ways to draft can be told apart, from files as `latency` writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.report.command import build
from harness.report.table import Table
from harness.results.files import append_rows
from report_files import latency_run, prompt_rows


def notes_of(directory: Path, num_prompts: int = 15, *, factor: float) -> str:
    """What the table of methods says below it: `lookup` takes `factor` times as long as `suffix`."""
    rng = np.random.default_rng(0)
    hardness = rng.lognormal(3, 0.4, num_prompts)
    for draft, scale in (("suffix", 1.0), ("lookup", factor)):
        run = latency_run(draft=draft, draft_method=draft, speedup=2.0 / scale)
        times = hardness * scale * np.exp(rng.normal(0, 0.05, num_prompts))
        append_rows(directory / "latency.csv", run)
        named = [("story", float(time)) for time in times]
        append_rows(directory / "latency_prompts.csv", prompt_rows(run, named))
    tables = [part for part in build([directory]).parts if isinstance(part, Table)]
    (methods,) = [table for table in tables if table.key == "methods"]
    return " ".join(methods.notes)


def test_methods_that_cannot_be_told_apart_are_named(tmp_path: Path) -> None:
    alike = notes_of(tmp_path / "alike", factor=1.005)
    assert "Cannot be told apart from" in alike
    assert "Significantly" not in alike
    apart = notes_of(tmp_path / "apart", factor=1.5)
    assert "Significantly slower than suffix: lookup (0.6" in apart
    assert "15 prompts" in apart
    assert notes_of(tmp_path / "few", 5, factor=1.5) == ""
