"""Sentences of `acceptance` about several drafts, from planted rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.commands.acceptance.page import acceptance_page
from harness.commands.acceptance.plots import acceptance_plots
from harness.results.files import append_rows
from harness.results.rows.acceptance import TEXTS_FILE, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run
from harness.results.statistics.interval import Interval
from pages import full
from report_files import run_id
from wording import mentions


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


def with_texts(
    run: Run[AcceptanceRow], directory: Path, iterations: Sequence[int], categories: str = "a"
) -> Run[AcceptanceRow]:
    """The run with eight texts of ten tokens, and the iterations that a text takes by K."""
    rows = [
        AcceptanceTextRow(
            run=run.id, prompt_index=index, category=categories[index % len(categories)], num_tokens=10,
            token_ids=[index], iterations_by_num_draft_tokens=[*iterations],
        )
        for index in range(8)
    ]  # fmt: skip
    append_rows(directory / TEXTS_FILE, rows)
    return Run(run.rows, directory=directory)


def test_categories_have_their_tokens_per_iteration(tmp_path: Path) -> None:
    run = checkpoint("7B", 1.5, 2.5, 2.0)
    one = full(acceptance_page([with_texts(run, tmp_path / "1", [8, 4, 5])]))
    assert "Where" not in one
    two = full(acceptance_page([with_texts(run, tmp_path / "2", [8, 4, 5], "ab")]))
    assert "Where a 2.50 · b 2.50" in " ".join(two.split())


def test_drafts_are_compared_on_the_same_texts(tmp_path: Path) -> None:
    """4 iterations of one step each against 5 of two steps: 0.40 of the speed-up."""
    runs = [
        with_texts(checkpoint("a", 1.5, 2.5), tmp_path / "1", [8, 4]),
        with_texts(checkpoint("b", 1.5, 2.0, iteration_cost=2.0), tmp_path / "2", [8, 5]),
    ]
    page = " ".join(full(acceptance_page(runs)).replace("│", " ").split())
    assert "13B a 2 2.50 (2.40 to 2.60) 2.50× 1.00 b 2 2.00 (1.90 to 2.10) 2.00 2.00× 0.40" in page
    assert mentions(page, "on the same texts of 8 prompts")


def test_a_run_that_read_nothing_has_no_page_and_no_plot() -> None:
    failed = [Run([AcceptanceRow(run=run_id(), model="13B", draft="7B", num_draft_tokens=4)])]
    assert acceptance_page(failed) is None
    assert acceptance_plots(failed)["acceptance"] == []
