"""The page of `latency`, about one run or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.commands.latency.tables.answer import page_of_run
from harness.commands.latency.tables.of_runs import page_of_runs
from harness.commands.latency.tables.run import was_measured
from harness.measuring.rows import LatencyRow
from harness.reporting.page import Page
from harness.results.runs import Run

if TYPE_CHECKING:
    from harness.reporting.drawing import Plot


def latency_page(runs: Sequence[Run[LatencyRow]]) -> Page | None:
    """The page of one run or of many; None where nothing was measured."""

    def plots() -> dict[str, list[Plot]]:
        from harness.commands.latency.plots import latency_plots

        return latency_plots(runs)

    page = _page(runs)
    return page and replace(page, plots=plots)


def _page(runs: Sequence[Run[LatencyRow]]) -> Page | None:
    measured = [run for run in runs if was_measured(run.rows)]
    if not measured:
        return None
    if len(measured) == 1:
        return page_of_run(measured[0].rows, measured[0].prompt_rows)
    return page_of_runs(runs)
