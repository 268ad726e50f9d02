"""The answer of a sweep of `latency`: the fastest pair, a row for each, and what to type next."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pandas as pd

from harness.commands.latency.ranking.answers import iteration_lines, latency_answers
from harness.commands.latency.ranking.pairs import latency_pairs
from harness.commands.latency.ranking.tables import (
    REGULAR_MS,
    SPECULATIVE_MS,
    SPEEDUP,
    K,
    differing_settings,
    remark,
    setting_column,
)
from harness.commands.latency.tables.doubts import not_quiet
from harness.commands.latency.tables.run import ACCEPTED, BOUNDS
from harness.reporting.answers import Step, answer_of_sweep
from harness.reporting.table import Answer, Column, Table
from harness.reporting.words import typed_again
from harness.results.runs import Run

# Settings that get a column, and pairs that are shown.
_MOST_SETTINGS = 3
_MOST_ROWS = 20
# Pairs whose iterations are explained.
_MOST_LINES = 2


def sweep_answer(runs: Sequence[Run]) -> Answer:
    """The answers of `report`, above a short table; empty where nothing was measured."""
    pairs = latency_pairs(runs)
    if pairs.empty:
        return []
    slow = not_quiet([run.rows for run in pairs.run])
    return answer_of_sweep(
        [*pairs.row],
        latency_answers(pairs),
        [_table(pairs)],
        doubts=[slow] if slow else [],
        why=[("Why", line) for line in iteration_lines(pairs)[:_MOST_LINES]],
        steps=_next_steps(pairs),
    )


def _table(pairs: pd.DataFrame) -> Table:
    columns = [*map(setting_column, differing_settings(pairs)[:_MOST_SETTINGS])]
    if pairs["name"].map(lambda name: name.pair).nunique() > 1:
        columns.insert(0, Column("pair", text=True, of="name.pair", once=True))
    columns += [
        K,
        SPEEDUP,
        BOUNDS.at("row"),
        Column("", of=remark, optional=True, text=True),
        SPECULATIVE_MS,
        REGULAR_MS,
        ACCEPTED.at("row"),
    ]
    shown = pairs.head(_MOST_ROWS).itertuples()
    num_more = len(pairs) - _MOST_ROWS
    notes = (f"    {num_more} more are in summary.txt",) if num_more > 0 else ()
    return Table.of(
        "pairs", "", shown, columns, strong="best_k", faint="partial", look="bare", notes=notes
    )


def _next_steps(pairs: pd.DataFrame) -> Iterator[Step]:
    """The most useful step."""
    again = functools.partial(typed_again, of_sweep=True)
    is_repeated = any(
        "repeat" in (run.rows[-1].settings or {}) or run.times > 1 for run in pairs.run
    )
    telling = pairs[pairs.best & pairs.has_interval & (pairs.why_not == "")]
    if (pairs.why_not != "").any():
        yield Step("each job several times, in turns", again("repeats=5"))
    elif not telling.empty:
        best = telling.loc[telling.speedup.idxmax()]
        of_series = pairs[pairs.series == best.series]
        is_largest = best.k_order == of_series.k_order.max() and isinstance(best.k, int)
        if not best.verdict.pays and "lookup" not in {*pairs.draft}:
            yield Step("none pays; a draft that costs nothing", again("draft=lookup"))
        elif best.verdict.pays and is_largest and of_series.k.nunique() > 1:
            yield Step(f"K={best.k} is the largest measured", again(f"K={2 * best.k}"))
        elif not is_repeated:
            yield Step("how far off other runs may be", again("repeats=5"))
