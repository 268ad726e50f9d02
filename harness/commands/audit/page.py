"""The page about typed figures: what an iteration costs, and what cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from harness.commands.audit.judge import Check
from harness.commands.audit.rows import Iteration, PrintedRow, line_to_type
from harness.config.amounts import counted
from harness.reporting.page import NextStep, Page
from harness.reporting.table import Column, Line, Table

_ON_SERVER = NextStep("on your server", command="harness latency -- YOUR_SERVER_COMMAND")
_WHY_LOW = NextStep(
    "why, as docs/low-acceptance.md says",
    command="harness acceptance model=TARGET draft=HEAD -- YOUR_SERVER_COMMAND",
)


def _printed(name: str) -> Callable[[Iteration], str]:
    return lambda iteration: iteration.row.figure(name).text


def _rate(iteration: Iteration) -> str:
    """`62 % of proposed`, by its reading."""
    rate = iteration.row.figure("acceptance_rate").text
    return f"{rate} of {iteration.reading}" if iteration.reading else rate


def _other_speedups(iteration: Iteration) -> str:
    texts = [f"{ratio:×} {what}" for what, ratio in iteration.row.speedups.items()]
    return ", ".join(texts[1:])


_COLUMNS = (
    Column("row", of="row.place", text=True),
    Column("K", of=_printed("num_draft_tokens"), optional=True),
    Column("accepted", of=_rate, optional=True),
    Column("yields,\ntokens", of="tokens", optional=True),
    Column("costs,\nsteps", of="steps", optional=True),
    Column("speed-up", "{:×}".format, "row.speedup", optional=True),
    Column("others", of=_other_speedups, text=True, optional=True),
    Column("held\nback by", of="held_back_by", text=True, optional=True),
    Column("all\naccepted", "{:×}".format, "at_most", optional=True),
)


def audit_page(stated: Sequence[PrintedRow], judged: Sequence[Check]) -> Page:
    """The page: first the verdicts, then what iterations cost."""
    excluded = {claim.row.place for claim in judged if claim.verdict == "impossible"}
    rows = [row for row in stated if row.place not in excluded]
    finding = []
    if judged:
        counts = Counter(claim.verdict for claim in judged)
        verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        checked = f"{counted(len(judged), 'figure')}, {verdicts}"
        unseen = "a raised rate or length mostly passes"
        finding.append(Line(f"checked against each other: {checked}; {unseen}", "strong"))
    accused = [claim for claim in judged if claim.verdict != "consistent"]
    finding += [Line(f"{claim.verdict}: {claim}") for claim in accused]
    iterations = [iteration for row in rows for iteration in row.iterations]
    table = Table.of("costs", "", iterations, _COLUMNS, look="plain")
    steps = [_ON_SERVER]
    if rows and not any(iteration.steps.is_known for iteration in iterations):
        steps.insert(0, NextStep("with what is missing", command=line_to_type(rows)))
    if rows and all(row.accepts_little for row in rows):
        steps.insert(0, _WHY_LOW)
    heading = f"figures · {counted(len(stated), 'row')} with speculation"
    return Page(heading, finding, tables=[table] if rows else (), next=steps)
