"""The page about a text: what was read, what an iteration costs, and what cannot be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from harness.commands.audit.judge import Check
from harness.commands.audit.rows import NOISE, PRINTED, AuditRow, Cost
from harness.commands.audit.texts import AuditedText, line_to_type
from harness.config.amounts import counted
from harness.reporting.page import NextStep, Page
from harness.reporting.table import Column, Line, Table
from harness.results.judging.acceptance import LITTLE

# Rows that get sentences; of more these are the slowest and the fastest.
_MOST_SENTENCES = 2
_MOST_LINES = 12
# How far the speed-ups of one row may be apart.
_APART = 1.25
# Costs that another implementation may reach.
_ROUND_STEPS = (1.5, 1.2, 1)
_ON_SERVER = NextStep("on your server", command="harness latency -- YOUR_SERVER_COMMAND")
_WHY_LOW = NextStep(
    "why", command="harness acceptance model=TARGET draft=HEAD -- YOUR_SERVER_COMMAND"
)
_READINGS = {
    "": "",
    "proposed": "if the rate is of proposed tokens (vLLM, llama.cpp), K in every iteration, ",
    "emitted": "if it is of emitted tokens (dflash-mlx, oMLX), ",
    "tested": "if it is of tested tokens (α of papers), ",
}
_COLUMNS = (
    Column("row", of=lambda row: row.name or row.place, text=True),
    Column("K", of=lambda row: row.figure("num_draft_tokens").text, optional=True),
    Column("load", of=lambda row: row.figure("batch_size").text, optional=True),
    Column("costs,\nsteps", of="cost.steps", optional=True),
    Column("yields,\ntokens", of=lambda row: next(iter(row.yields.values()), ""), optional=True),
    Column("speed-up", "{:×}".format, "speedup", optional=True),
    Column("accepted", of=lambda row: row.figure("acceptance_rate").text, optional=True),
    Column("if all were\naccepted", "{:×}".format, "cost.at_most", optional=True),
)


def audit_page(title: str, reading: AuditedText, judged: Sequence[Check]) -> Page:
    """The page: first what was read, then what iterations cost, then the verdicts."""
    excluded = {claim.row.place for claim in judged if claim.verdict == "impossible"}
    rows = [row for row in reading.rows if row.place not in excluded]
    finding = [Line(note, "dim") for note in reading.notes]
    finding += _lines_of_costs(rows)
    counts = Counter(claim.verdict for claim in judged if claim.verdict != "not stated")
    if counts:
        verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        checked = f"{counts.total()} of {counted(len(judged), 'figure')}, {verdicts}"
        unseen = "a raised rate or length mostly passes"
        finding.append(Line(f"checked against each other: {checked}; {unseen}", "strong"))
    for verdict in ("impossible", "unlikely"):
        accused = [claim for claim in judged if claim.verdict == verdict]
        finding += [Line(f"{verdict}: {claim}") for claim in accused]
    table = Table.of("costs", "", rows, _COLUMNS, look="bare")
    steps = [_ON_SERVER]
    if rows and not any(row.costs for row in rows):
        steps.insert(0, NextStep("with what is missing", command=line_to_type(rows)))
    yields_nothing = any(cost.tokens.high <= 1 + NOISE for row in rows for cost in row.costs)
    if yields_nothing or any(row.figure("acceptance_rate").high < LITTLE for row in rows):
        steps.insert(0, _WHY_LOW)
    heading = f"{title} · {counted(len(reading.rows), 'row')}"
    return Page(heading, finding, tables=[table] if rows else (), next=steps)


def _lines_of_costs(rows: Sequence[AuditRow]) -> list[Line]:
    """Lines about what an iteration costs, what holds the speed-up back, and what other values would give."""
    lines = []
    for row in rows:
        gains = {
            name: gain for name, gain in row.speedups.items() if name not in (PRINTED, "latency")
        }
        middles = [gain.middle for gain in gains.values()]
        if middles and max(middles) > _APART * min(middles):
            texts = ", ".join(f"{gain:×} by {name}" for name, gain in gains.items())
            lines.append(Line(f"{row.label}: {texts}: requests queue, or runs differ"))
    priced = shown = [row for row in rows if row.costs]
    if len(priced) > _MOST_SENTENCES:
        slowest_first = sorted(priced, key=lambda row: row.speedup.middle)
        shown = [slowest_first[0], slowest_first[-1]]
    for row in shown:
        lines += [Line(f"{row.label}: {_sentence(row, cost)}") for cost in row.costs]
    lacking = []
    if not any(row.speedups for row in rows):
        lacking.append("a speed-up or the regular arm's speed (baseline=)")
    if not any(row.yields for row in rows):
        lacking.append("a length, or K and an acceptance rate")
    if rows and lacking:
        needed = " and ".join(lacking)
        lines.append(Line(f"no cost of an iteration follows: that needs {needed}", "strong"))
    return lines


def _sentence(row: AuditRow, cost: Cost) -> str:
    """`3.15 tokens per iteration of 4.63 steps, 0.68×. Its cost holds it back more: …`."""
    steps, at_most = cost.steps.middle, cost.at_most.middle
    yields = f"{cost.tokens} tokens per iteration of {cost.steps} steps"
    start = f"{_READINGS[cost.reading]}{yields}, {row.speedup:×}"
    if cost.steps.high < 1 - NOISE:
        return f"{start}: less than one step, so more than speculation differs between the arms"
    if cost.tokens.high <= 1 + NOISE:
        return f"{start}: almost nothing is accepted, as of a broken head or of another model's"
    if steps <= 1 + NOISE:
        return f"{start}: drafting and verifying are almost free, or the speed-up is computed from the acceptance"
    if math.isnan(at_most):
        return f"{start}; at one step it would be {cost.tokens:×}"
    if at_most < 1:
        return f"{start}: slower even with all accepted ({at_most:.2f}×)"
    fewer = next((fewer for fewer in _ROUND_STEPS if fewer < 0.9 * steps), 1)
    by_steps = cost.tokens.middle / fewer
    held_by = "cost" if by_steps > at_most else "acceptance"
    at = "one step" if fewer == 1 else f"{fewer:.1f} steps"
    ways = f"with all accepted {at_most:.2f}×, at {at} {by_steps:.2f}×"
    return f"{start}. Its {held_by} holds it back more: {ways}"
