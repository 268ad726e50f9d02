"""The page of `latency`, about one run or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.commands.latency.steps import steps_after_run, steps_after_runs
from harness.commands.latency.tables.answer import checked, end, has_verdict, headline, reasons
from harness.commands.latency.tables.categories import divided_tables
from harness.commands.latency.tables.costs import times_table
from harness.commands.latency.tables.doubts import doubts
from harness.commands.latency.tables.figures import (
    arms_table,
    pairs_table,
    reasons_table,
    requests_table,
)
from harness.commands.latency.tables.published import published_table
from harness.commands.latency.tables.ranking import (
    RankedRun,
    iteration_lines,
    latency_answers,
    not_ordered,
    ranked_runs,
    statements_about,
)
from harness.measuring.rows import LatencyRow
from harness.reporting.page import Page, heading, title_of_many
from harness.reporting.table import Column, Line, Table, number
from harness.reporting.words import arm_name, disturbed_runs, settings_line
from harness.results.runs import Run

if TYPE_CHECKING:
    from harness.reporting.drawing import Plot

# Pairs whose iterations are explained.
_MOST_LINES = 2
# Characters of the longest bar.
_BAR = 16


def latency_page(runs: Sequence[Run[LatencyRow]]) -> Page | None:
    """The page of one run or of many; None where nothing was measured."""
    pairs = ranked_runs(runs)
    if not pairs:
        return None

    def plots() -> dict[str, list[Plot]]:
        from harness.commands.latency.plots import latency_plots

        return latency_plots(pairs)

    page = _page_of_run(pairs[0]) if len(pairs) == 1 else _page_of_runs(pairs)
    return replace(page, plots=plots)


def _page_of_run(pair: RankedRun) -> Page:
    """The verdict, both arms, why, what to type next, and the figures behind it."""
    run = pair.run
    return Page(
        heading(run.last, settings_line(run.rows)),
        [headline(pair.member.alone)] if has_verdict(run.rows) else [],
        doubts(run),
        [
            _bars(run.rows),
            arms_table([pair]),
            requests_table(run),
            reasons_table([pair]),
            times_table(run.rows[0], run.last),
            *divided_tables([pair]),
            published_table([pair] if run.status == "ok" else []),
        ],
        [
            *(("Why", reason) for reason in reasons(run)),
            *(("Checked", held) for held in checked(run.rows)),
            *(("Ended", ended) for ended in end(run.last)),
        ],
        steps_after_run(run.rows),
        [pair.member.alone] if has_verdict(run.rows) else [],
    )


def _page_of_runs(pairs: Sequence[RankedRun]) -> Page:
    """The fastest pair, a row for each, and what to type next."""
    # At their best K, and targets alone.
    shown = [pair for pair in pairs if pair.is_best_of_draft]
    shown += [pair for pair in pairs if pair.speedup is None and not pair.member.is_partial]
    disturbed = disturbed_runs([pair.run for pair in pairs])
    not_quiet = [f"{disturbed}: repeats=5 measures what that changes."] if disturbed else []
    iterations = iteration_lines(pairs)
    return Page(
        title_of_many([pair.row for pair in pairs]),
        latency_answers(pairs) or [Line("nothing was compared")],
        [*not_quiet, *not_ordered(pairs)],
        [
            pairs_table(pairs, iterations[_MOST_LINES:]),
            *divided_tables(pairs),
            reasons_table(pairs),
            arms_table(pairs),
            published_table(shown),
        ],
        [("Why", line) for line in iterations[:_MOST_LINES]],
        steps_after_runs(pairs),
        statements_about(pairs),
    )


def _bars(rows: Sequence[LatencyRow]) -> Table:
    """A line for each arm, with a bar as long as its time per token."""
    longest = max(row.ms_per_token or 0.0 for row in rows) or 1.0
    columns = (
        Column("", text=True, of=arm_name),
        Column("", lambda ms: "█" * round(_BAR * ms / longest), "ms_per_token", text=True),
        Column("ms/token", number(), "ms_per_token"),
        Column("tokens/s", number(1), "tokens_per_second", optional=True),
        Column("first token ms", number(1), "time_to_first_token_ms", optional=True),
    )
    return Table.of("bars", "", rows, columns, look="bare")
