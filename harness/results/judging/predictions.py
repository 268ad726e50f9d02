"""Speed-ups that are predicted for each draft, load and K: which is the highest at a load, and whether it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from harness.results.judging.choice import best_of, choice_of
from harness.results.judging.statement import Statement
from harness.results.price.value import ratio
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval

_PREDICTED = "predicted speed-up"


def highest_prediction(rows: Sequence[Any]) -> Any:
    """The row with the highest prediction."""
    return rows[best_of(_speedups(rows))]


def _speedups(rows: Sequence[Any]) -> dict[int, Interval]:
    """The predictions by their place."""
    return {place: row.predicted_speedup or Interval() for place, row in enumerate(rows)}


def judged_predictions(rows: Sequence[Any]) -> list[list[Statement]]:
    """For each load whether the highest prediction pays, and then how each other one compares with it.

    K of one draft share a regular step, which moves none against another: their shares are in the rows.
    """
    sources = attrgetter("cost_source", "acceptance_source", "batch_size")
    return [_of_load(alike) for alike in grouped(rows, sources).values()]


def _of_load(rows: Sequence[Any]) -> list[Statement]:
    speedups = _speedups(rows)

    def share_of(place: int, best: int) -> Interval:
        row = rows[place]
        if row.draft == rows[best].draft and row.relative_to_best is not None:
            return row.relative_to_best
        return ratio(speedups[place], speedups[best])

    choice = choice_of(speedups, share_of)
    best = rows[choice.best]
    statements = [replace(choice.verdicts[choice.best], subject=best, figure=_PREDICTED)]
    for place, standing in choice.standings.items():
        statements.append(replace(standing, subject=rows[place], reference=best, figure=_PREDICTED))
    return statements
