"""The page of many runs of `latency`: the fastest pair, a row for each, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.commands.latency.ranking.answers import (
    close_not_ordered,
    iteration_lines,
    latency_answers,
)
from harness.commands.latency.ranking.pairs import latency_pairs
from harness.commands.latency.ranking.published_table import Measured, published_tables
from harness.commands.latency.ranking.tables import (
    arms_table,
    categories_table,
    pairs_table,
    reasons_table,
)
from harness.commands.latency.tables.doubts import not_quiet
from harness.reporting.page import Page, Step, title_of_many
from harness.reporting.table import Line
from harness.results.runs import Run

# Pairs whose iterations are explained.
_MOST_LINES = 2


def page_of_runs(runs: Sequence[Run]) -> Page | None:
    """The page of many runs; None where nothing was measured."""
    pairs = latency_pairs(runs)
    if pairs.empty:
        return None
    # At their best K, and targets alone.
    is_alone = pairs.speedup.isna() & ~pairs.partial
    measured = [
        Measured(pair.name.label(), pair.row, pair.regular)
        for pair in pd.concat([pairs[pairs.best], pairs[is_alone]]).itertuples()
    ]
    doubts = [not_quiet([run.rows for run in pairs.run]), close_not_ordered(pairs)]
    iterations = iteration_lines(pairs)
    return Page(
        title_of_many([*pairs.row]),
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


def _next_steps(pairs: pd.DataFrame) -> Iterator[Step]:
    """The most useful step."""
    is_repeated = any(
        "repeat" in (run.rows[-1].settings or {}) or run.times > 1 for run in pairs.run
    )
    telling = pairs[pairs.best & pairs.has_interval & (pairs.why_not == "")]
    if (pairs.why_not != "").any():
        yield Step("each job several times, in turns", "repeats=5")
    elif not telling.empty:
        best = telling.sort_values(["shown", "speedup"]).iloc[-1]
        of_series = pairs[pairs.series == best.series]
        is_largest = best.k_order == of_series.k_order.max() and isinstance(best.k, int)
        # What a server drafts with is in its command.
        has_other_drafts = not best.row.is_elsewhere and "lookup" not in {*pairs.draft}
        if not best.verdict.pays and has_other_drafts:
            yield Step("none is shown to pay; a draft that costs nothing", "draft=lookup")
        elif best.verdict.pays and is_largest and of_series.k.nunique() > 1:
            yield Step(f"K={best.k} is the largest measured", f"K={2 * best.k}")
        elif not is_repeated:
            yield Step("how far off other runs may be", "repeats=5")
