"""The page about a text: what was read, what an iteration costs, and what cannot be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from harness.commands.audit.judge import Judged
from harness.commands.audit.rows import AuditRow
from harness.commands.audit.tables import AuditedText, typed_line
from harness.config.amounts import counted, percent
from harness.reporting.page import NextStep, Page
from harness.reporting.table import Column, Line, Table, times
from harness.results.price.shape import Point, shape_of
from harness.results.printed.figures import PrintedFigure
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval

# Rows that get a sentence; more are in the table.
_MOST_SENTENCES = 4
_MOST_LINES = 12
# Costs that are tried where no other row has a lower one.
_ROUND_STEPS = (1.5, 1.2, 1)
# An iteration that costs this many steps or fewer has nothing left to gain.
_ALMOST_FREE = 1.05
_ON_SERVER = NextStep("on your server", command="harness latency -- YOUR_SERVER_COMMAND")


def _known(form: Callable[[float], str]) -> Callable[[float], str]:
    """The form of a number that may not be known."""
    return lambda value: "" if math.isnan(value) else form(value)


_COLUMNS = (
    Column("row", of=lambda row: row.name or row.place, text=True),
    Column("K", _known("{:g}".format), "k", optional=True),
    Column("load", _known("{:g}".format), "load", optional=True),
    Column("costs,\nsteps", of="steps", optional=True, meaning="of an iteration, in regular steps"),
    Column("yields,\ntokens", _known("{:.2f}".format), "tokens.middle", optional=True),
    Column("speed-up", _known(times), "speedup.middle", optional=True),
    Column("accepted", _known(percent), "rate", optional=True),
    Column("if all were\naccepted", _known(times), "speedup_at_most", optional=True),
)


def audit_page(
    title: str, reading: AuditedText, computed: Collection[str], judged: Sequence[Judged]
) -> Page:
    """The page: first what was read, then what iterations cost, then the verdicts."""
    excluded = {claim.row.place for claim in judged if claim.verdict == "impossible"}
    excluded |= {*computed}
    rows = [row for row in reading.rows if row.place not in excluded]
    finding = [Line(note, "dim") for note in reading.notes]
    if computed:
        measured = "computed, not measured, so that no cost follows"
        text = f"the speed-ups of {counted(len(computed), 'row')} are what the acceptance gives, to the last digit"
        finding.append(Line(f"{text}: {measured}", "strong"))
    finding += _lines_of_costs(rows)
    counts = Counter(claim.verdict for claim in judged if claim.verdict != "not stated")
    if counts:
        verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        checked = f"{counts.total()} of {counted(len(judged), 'figure')}"
        unseen = "a raised rate or length mostly passes"
        finding.append(
            Line(f"checked against each other: {checked}, {verdicts}; {unseen}", "strong")
        )
    for verdict in ("impossible", "unlikely"):
        accused = [claim for claim in judged if claim.verdict == verdict]
        finding += [Line(f"{verdict}: {claim}") for claim in accused]
    table = Table.of("costs", "", rows, _COLUMNS, look="bare")
    heading = f"{title} · {counted(len(reading.rows), 'row')}"
    steps = [_ON_SERVER]
    if rows and not any(row.steps.is_known for row in rows):
        steps.insert(0, NextStep("with what is missing", command=typed_line(rows)))
    return Page(heading, finding, tables=[table] if rows else (), next=steps)


def _lines_of_costs(rows: Sequence[AuditRow]) -> list[Line]:
    """Lines about what an iteration costs, what holds the speed-up back, and what other values would give."""
    lines = []
    for row in rows:
        if row.is_apart:
            gains = ", ".join(
                f"{gain.middle:.2f}× by {what}" for what, gain in row.speedups.items()
            )
            queues = "so far apart, requests queue or runs differ, and no cost follows"
            lines.append(Line(f"{row.label}: {gains}: {queues}"))
    priced = [row for row in rows if row.steps.is_known]
    if not priced:
        lacking = []
        if not any(row.speedup.is_known for row in rows):
            lacking.append("a speed-up or the regular arm's speed (baseline=)")
        if not any(row.tokens.is_known for row in rows):
            lacking.append("a length, or K and an acceptance rate")
        text = f"no cost of an iteration follows: that needs {' and '.join(lacking)}"
        return [*lines, Line(text, "strong")] if rows else []
    by_load = grouped(priced, lambda row: row.circumstances["load"])
    for load, of_load in by_load.items():
        costs = [row.steps for row in of_load]
        span = PrintedFigure(min(cost.low for cost in costs), max(cost.high for cost in costs))
        where = f" with {load} in flight" if load else ""
        where += f", in {len(costs)} rows" if len(costs) > 1 else ""
        lines.append(Line(f"An iteration costs {span} regular steps{where}", "strong"))
    chosen = priced
    if len(priced) > _MOST_SENTENCES:
        slowest_first = sorted(priced, key=lambda row: row.speedup.middle)
        chosen = [slowest_first[0], slowest_first[-1]]
    lines += [Line(_sentence(row, by_load[row.circumstances["load"]])) for row in chosen]
    lines += _lines_over_k(priced)
    if any("tokens_per_iteration" not in row.figures and row.proposes_k for row in priced):
        assumed = (
            "K tokens are drafted in every iteration, and the first token of an answer is left out"
        )
        lines.append(Line(f"assumed: {assumed}", "dim"))
    if without_own := [row.place for row in priced if row.is_without_own_token]:
        places = ", ".join(without_own[:_MOST_SENTENCES])
        assumed = f"the length of {places} lacks the target's own token, by the rate: 1 is added"
        lines.append(Line(f"assumed: {assumed}", "dim"))
    return lines


def _sentence(row: AuditRow, others: Sequence[AuditRow]) -> str:
    """`row 1 (CUDA, K=6): 3.15 tokens per iteration of 4.63 steps, 0.68×. Its cost holds it back more: …`."""
    yields = f"{row.tokens.middle:.2f} tokens per iteration of {row.steps} steps"
    start = f"{row.label}: {yields}, {row.speedup.middle:.2f}×"
    if not row.is_possible:
        return f"{start}: less than one step, so more than speculation differs between the arms"
    if row.steps.middle <= _ALMOST_FREE:
        return f"{start}: drafting and verifying must be almost free"
    if math.isnan(row.most_tokens):
        return f"{start}; at one step it would be {row.tokens.middle:.2f}×"
    if row.speedup_at_most < 1:
        return f"{start}: slower even with all accepted ({row.speedup_at_most:.2f}×)"
    # What another acceptance and another cost would give: those of other rows of the same K, or round ones.
    others = [other for other in others if other is not row and other.k == row.k]
    best = max(others, key=lambda other: other.rate, default=row)
    rate, accepted = 1.0, "with all accepted"
    if best.rate > row.rate + 0.03:
        rate, accepted = best.rate, f"at {percent(best.rate)} accepted ({best.place})"
    cheapest = min(
        (other for other in others if other.steps.middle >= 1),
        key=lambda other: other.steps.middle,
        default=row,
    )
    below = 0.9 * row.steps.middle
    steps, whose = next((steps for steps in _ROUND_STEPS if steps < below), 1.0), ""
    if cheapest.steps.middle < below:
        steps, whose = cheapest.steps.middle, f" ({cheapest.place})"
    by_rate, by_steps = row.speedup_at(rate), row.tokens.middle / steps
    held_by = "cost" if by_steps > by_rate else "acceptance"
    at = "one step" if steps == 1 else f"{steps:.1f} steps"
    ways = f"{accepted} {by_rate:.2f}×, at {at}{whose} {by_steps:.2f}×"
    return f"{start}. Its {held_by} holds it back more: {ways}"


def _lines_over_k(priced: Sequence[AuditRow]) -> list[Line]:
    """The fixed part and the part of each draft token, where a curve of one load has several K."""
    chains = [row for row in priced if row.k >= 1 and not row.is_tree]
    lines = []
    for curve in grouped(chains, lambda row: (row.name, str(row.circumstances))).values():
        by_k = {row.k: row.steps for row in curve}
        if len(by_k) < max(3, len(curve)) or by_k[max(by_k)].middle <= by_k[min(by_k)].middle:
            continue
        points = []
        for k, cost in sorted(by_k.items()):
            steps = Interval(cost.middle, cost.low, cost.high)
            points.append(Point(int(k) + 1, 1, Interval(), steps, k))
        shape = shape_of(points)
        assert shape is not None
        text = str(shape)
        if shape.fixed is not None and shape.per_token is not None:
            per_token = f"{shape.per_token.estimate:.2f} for each draft token"
            text = f"{shape.fixed.estimate:.2f} steps and {per_token}, a line within noise"
        whose = f" of {curve[0].name}" if len(curve) < len(priced) else ""
        load = curve[0].circumstances["load"]
        with_load = f" with {load} in flight" if load else ""
        lines.append(Line(f"over K{whose}{with_load}: {text}"))
    return lines[:_MOST_LINES]
