"""Sentences of `acceptance` about several drafts, from planted rows."""

from __future__ import annotations

from typing import Any

from harness.commands.acceptance.plots import acceptance_plots
from harness.commands.acceptance.tables import acceptance_page
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.runs import Run
from harness.results.statistics.interval import Interval
from pages import short
from report_files import run_id


def checkpoint(path: str, *lengths: float, **columns: Any) -> Run[AcceptanceRow]:
    """A run with tokens per iteration at K=1, 2 and so on; an iteration costs one step."""
    shared = {"run": run_id(), "model": "13B", "draft": path, "status": "ok", "num_texts": 9}
    shared |= {"text_source": "given", "max_new_tokens": 64, "batch_size": 64, "num_tokens": 99}
    rows = [
        AcceptanceRow(
            **shared | columns,
            num_draft_tokens=k,
            tokens_per_iteration=Interval(length, length - 0.1, length + 0.1),
            expected_speedup=Interval(length, length - 0.1, length + 0.1),
        )
        for k, length in enumerate(lengths, start=1)
    ]
    return Run(rows)


def test_checkpoints_of_one_name_are_told_apart_and_k_is_said_once() -> None:
    runs = [checkpoint("./a/step_100", 1.5, 2.5, 2.0), checkpoint("./b/step_100", 1.5, 1.7, 1.6)]
    shown = " ".join(short(acceptance_page(runs), 120).split())
    assert "./a/step_100: 2.50 tokens per iteration at K=2" in shown
    assert "computed from probabilities, not timed" in shown
    assert "./b/step_100 · " not in shown, "the path is the name already"
    page = acceptance_page(runs)
    assert page is not None
    for line in page.finding:
        assert line.text.count("K=") == 1


def test_a_run_that_read_nothing_has_no_page_and_no_plot() -> None:
    failed = [Run([AcceptanceRow(run=run_id(), model="13B", draft="7B", num_draft_tokens=4)])]
    assert acceptance_page(failed) is None
    assert acceptance_plots(failed)["acceptance"] == []
