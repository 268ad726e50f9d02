"""The page of many runs of `latency`: the fastest pair, a row for each, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from harness.commands.latency.tables.compared import (
    arms_table,
    categories_table,
    pairs_table,
    reasons_table,
)
from harness.commands.latency.tables.doubts import not_quiet
from harness.commands.latency.tables.published import Measured, published_tables
from harness.commands.latency.tables.ranked import RankedRun, ranked_runs
from harness.commands.latency.tables.ranking import (
    close_not_ordered,
    iteration_lines,
    latency_answers,
)
from harness.measuring.rows import LatencyRow
from harness.reporting.page import Page, Step, title_of_many
from harness.reporting.table import Line
from harness.results.runs import Run

# Pairs whose iterations are explained.
_MOST_LINES = 2


def page_of_runs(runs: Sequence[Run[LatencyRow]]) -> Page | None:
    """The page of many runs; None where nothing was measured."""
    pairs = ranked_runs(runs)
    if not pairs:
        return None
    # At their best K, and targets alone.
    alone = [pair for pair in pairs if pair.speedup is None and not pair.is_partial]
    measured = [
        Measured(pair.name.label(), pair.row, pair.regular)
        for pair in [*filter(attrgetter("best"), pairs), *alone]
    ]
    doubts = [not_quiet([pair.run.rows for pair in pairs]), close_not_ordered(pairs)]
    iterations = iteration_lines(pairs)
    return Page(
        title_of_many([pair.row for pair in pairs]),
        latency_answers(pairs) or [Line("nothing was compared")],
        [*filter(None, doubts)],
        [
            pairs_table(pairs, iterations[_MOST_LINES:]),
            categories_table(pairs),
            reasons_table(pairs),
            arms_table(pairs),
            *published_tables(measured),
        ],
        [("Why", line) for line in iterations[:_MOST_LINES]],
        [*_next_steps(pairs)],
    )


def _next_steps(pairs: Sequence[RankedRun]) -> Iterator[Step]:
    """The most useful step."""
    is_repeated = any("repeat" in (pair.row.settings or {}) or pair.run.times > 1 for pair in pairs)
    if any(pair.why_not for pair in pairs):
        yield Step("each job several times, in turns", "repeats=5")
        return
    telling = [pair for pair in pairs if pair.best and pair.has_interval]
    if not telling:
        return
    best = sorted(telling, key=attrgetter("shown", "speedup"))[-1]
    series = [pair for pair in pairs if pair.series == best.series]
    has_several = len({pair.k for pair in series if pair.k is not None}) > 1
    is_largest = best.name.k_order == max(pair.name.k_order for pair in series)
    # What a server drafts with is in its command.
    has_other_drafts = not best.row.is_elsewhere and all(pair.draft != "lookup" for pair in pairs)
    if not best.verdict.pays and has_other_drafts:
        yield Step("none is shown to pay; a draft that costs nothing", "draft=lookup")
    elif best.verdict.pays and isinstance(best.k, int) and is_largest and has_several:
        yield Step(f"K={best.k} is the largest measured", f"K={2 * best.k}")
    elif not is_repeated:
        yield Step("how far off other runs may be", "repeats=5")
