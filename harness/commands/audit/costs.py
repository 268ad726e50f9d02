"""The cost of an iteration by published figures, in sentences and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.config.amounts import counted
from harness.reporting.table import Column, Line, Table
from harness.results.claims.stated import Stated
from harness.results.explained import (
    Explained,
    Span,
    contradicting,
    explained,
    speedup_of,
    tokens_of,
)
from harness.results.iteration_cost import IterationCost, Point
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval

# Rows that get a sentence; more are in the table.
_MOST_SENTENCES = 4
_MOST_LINES = 3
# Below this cost, drafting and verifying are almost free.
_NEARLY_FREE = 1.15
# Costs that are tried where no other row has a lower one.
_ROUND_STEPS = (1.5, 1.2, 1)


def lines_of_costs(tables: Sequence[Sequence[Stated]]) -> list[Line]:
    """What an iteration costs, what holds the speed-up back, and what other values would give."""
    lines = []
    rows = [row for table in tables for row in table if not row.is_regular]
    costs = _explained(tables)
    if costs:
        least = min(costs, key=lambda one: one.cost.middle).cost
        most = max(costs, key=lambda one: one.cost.middle).cost
        span = str(least) if len(costs) == 1 else f"{least.middle:.2f} to {most.middle:.2f}"
        steps = "" if len(costs) == 1 else f", in {counted(len(costs), 'row')}"
        lines.append(Line(f"An iteration costs {span} regular steps{steps}", "strong"))
        slowest_first = sorted(costs, key=lambda one: one.speedup.middle)
        chosen = costs if len(costs) <= _MOST_SENTENCES else [slowest_first[0], slowest_first[-1]]
        lines += [Line(_sentence(one, costs)) for one in chosen]
        lines += _lines_over_k(tables)
        if any(one.by == "K" for one in costs):
            lines.append(
                Line(
                    "assumed: K tokens are drafted in every iteration, and the first token of an answer is left out",
                    "dim",
                )
            )
    elif len(rows) == 1:
        lines += _of_one_figure(rows[0])
    return lines


def cost_table(tables: Sequence[Sequence[Stated]]) -> Table:
    """Each row whose figures hold the cost of an iteration."""
    rows = _explained(tables)

    def held_by(one: Explained) -> str | None:
        if one.cost.high < 1 or math.isnan(one.row.k):
            return None
        return _ways(one, rows).held_by

    columns = (
        Column("row", of=lambda one: one.row.name or one.row.place, text=True),
        Column("K", of=lambda one: _count(one.row, "num_draft_tokens"), optional=True),
        Column("load", of=lambda one: _count(one.row, "batch_size"), optional=True),
        Column(
            "costs,\nsteps",
            of=lambda one: str(one.cost),
            meaning="of an iteration, in regular steps",
        ),
        Column("yields,\ntokens", of=lambda one: f"{one.tokens.middle:.2f}"),
        Column("speed-up", of=lambda one: f"{one.speedup.middle:.2f}×"),
        Column(
            "accepted",
            of=lambda one: None if math.isnan(one.rate) else f"{one.rate:.0%}",
            optional=True,
        ),
        Column(
            "if all were\naccepted",
            of=lambda one: None if math.isnan(one.row.k) else f"{one.at_rate(1):.2f}×",
            optional=True,
        ),
        Column("held back\nby its", of=held_by, text=True, optional=True),
    )
    return Table.of("costs", "", rows, columns)


def _explained(tables: Sequence[Sequence[Stated]]) -> list[Explained]:
    return [one for table in tables for row in table if (one := explained(row)) is not None]


def _count(row: Stated, name: str) -> str | None:
    return f"{row.numbers[name].low:g}" if name in row.numbers else None


def _sentence(one: Explained, others: Sequence[Explained]) -> str:
    """`row 1 (CUDA, K=6): 3.15 tokens per iteration of 4.63 steps, 0.68×. Its cost holds it back more: …`."""
    cost = one.cost
    start = f"{one.row.label}: {one.tokens.middle:.2f} tokens per iteration of {cost} steps, {one.speedup.middle:.2f}×"
    if cost.high < 1:
        return (
            f"{start}: less than one step, so that more than speculation differs between the arms"
        )
    if math.isnan(one.row.k) and cost.middle >= _NEARLY_FREE:
        return f"{start}; at one step it would be {one.at_cost(1):.2f}×"
    if cost.middle < _NEARLY_FREE:
        return f"{start}: drafting and verifying must be almost free"
    if one.at_rate(1) < 1:
        return (
            f"{start}: slower than regular decoding even with all accepted ({one.at_rate(1):.2f}×)"
        )
    ways = _ways(one, others)
    return f"{start}. Its {ways.held_by} holds it back more: {ways.words}"


class _Ways(NamedTuple):
    """What another acceptance and another cost would give: those of other rows of the same K, or round ones.

    Attributes:
        by_rate, by_cost: the speed-up with each.
        words: both, as printed.
    """

    by_rate: float
    by_cost: float
    words: str

    @property
    def held_by(self) -> str:
        """What holds the speed-up back: the one of the two that gains more."""
        return "cost" if self.by_cost > self.by_rate else "acceptance"


def _ways(one: Explained, others: Sequence[Explained]) -> _Ways:
    """Of a row that states K."""
    same_k = [other for other in others if other is not one and other.row.k == one.row.k]
    better = [other for other in same_k if other.rate > one.rate + 0.03]
    rate, accepted = 1.0, "with all accepted"
    if better:
        best = max(better, key=lambda other: other.rate)
        rate, accepted = best.rate, f"at {best.rate:.0%} accepted ({best.row.place})"
    by_rate = one.at_rate(rate)
    cheaper = [other for other in same_k if 1 <= other.cost.middle < 0.9 * one.cost.middle]
    if cheaper:
        least = min(cheaper, key=lambda other: other.cost.middle)
        steps, whose = round(least.cost.middle, 1), f" ({least.row.place})"
    else:
        steps = next((steps for steps in _ROUND_STEPS if steps < 0.9 * one.cost.middle), 1)
        whose = ""
    by_cost = one.at_cost(steps)
    words = f"{accepted} {by_rate:.2f}×, at {_steps(steps)}{whose} {by_cost:.2f}×"
    return _Ways(by_rate, by_cost, words)


def _steps(steps: float) -> str:
    return "one step" if steps == 1 else f"{steps:g} steps"


def _lines_over_k(tables: Sequence[Sequence[Stated]]) -> list[Line]:
    """The fixed part and the part of each draft token, where a curve has several K."""
    lines = []
    for table in tables:
        # A length that is of another K is on no line.
        wrong = contradicting(table)
        points = [one for one in _explained([table]) if one.row.place not in wrong]
        for curve in grouped(points, lambda one: one.row.circumstances(("run", "arm"))).values():
            costs = {one.row.k: one.cost for one in curve if not math.isnan(one.row.k)}
            if len(costs) < len(curve) or len(costs) < 2 or costs[max(costs)] <= costs[min(costs)]:
                continue
            name = curve[0].row.name
            of = f" of {name}" if name and len(table) > len(curve) + 1 else ""
            lines.append(Line(f"over K{of}: {_over_k(costs)}"))
    return lines[:_MOST_LINES]


def _over_k(costs: dict[float, Span]) -> str:
    points = []
    for k, cost in sorted(costs.items()):
        steps = Interval(cost.middle, cost.low, cost.high)
        points.append(Point(int(k) + 1, 1, Interval(), steps, k))
    shape = IterationCost(points).shape()
    assert shape is not None
    if shape.fixed is None or shape.per_token is None:
        return str(shape)
    each = f"{shape.per_token.estimate:.2f}"
    if len(points) == 2:
        first, last = sorted(costs)
        between = f"between K={first:g} and K={last:g}; two points test no line"
        return f"a draft token adds {each} steps {between}"
    return f"{shape.fixed.estimate:.2f} steps and {each} for each draft token, a line within noise"


def _of_one_figure(row: Stated) -> list[Line]:
    """What a figure needs, where the cost does not follow."""
    speedup = speedup_of(row)
    tokens = tokens_of(row)
    if speedup is not None and row.k >= 1:
        most = (row.k + 1) / speedup.middle
        if most < 1:
            return []
        needed = max(0.0, (speedup.middle - 1) / row.k)
        text = (
            f"{speedup.middle:.2f}× at K={row.k:g}: at least {needed:.0%} must be accepted, and if all are,"
            f" an iteration may cost {most:.2f} regular steps"
        )
        return [Line(text, "strong")]
    if tokens is not None and speedup is None:
        least = f"{tokens[0].middle:.2f}"
        text = f"{least} tokens per iteration pay if an iteration costs less than {least} regular steps"
        return [Line(text, "strong")]
    return []
