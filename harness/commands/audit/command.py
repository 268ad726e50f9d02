"""`audit`: what an iteration costs by published figures, and whether these are possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from typing import Any, Literal

from harness.commands.arguments import read_arguments
from harness.commands.audit.figures import NUMBERS
from harness.commands.audit.judge import VERDICTS, Check, judge
from harness.commands.audit.rows import (
    SHORT_NAMES,
    Iteration,
    PrintedRow,
    line_to_type,
    stated_rows,
)
from harness.config.amounts import counted
from harness.config.command_line import Words
from harness.config.errors import CANNOT_TELL, SettingError, VerdictError
from harness.reporting.page import NextStep, Page, in_full
from harness.reporting.table import Column, Line, Table
from harness.reporting.terminal import WIDE, plain_console, print_document

_EXAMPLE = "audit baseline=22.7 speed=40.6 acceptance=73.9% K=3"
_LISTS = dict.fromkeys((*SHORT_NAMES, *NUMBERS, "k"))
_Tool = Literal["llama.cpp", "vllm", "dflash"]
_ARGUMENTS: type[Any] = make_dataclass(
    "AuditSettings",
    [
        *((name, list[str], field(default_factory=list)) for name in _LISTS),
        ("tool", _Tool, field(default="")),
    ],
)


def main(words: Words) -> None:
    """The command `audit`.

    Raises:
        SettingError: a wrong argument, or none.
        VerdictError: a claim is impossible (exit code 1), or unlikely, or none could be checked (3).
    """
    settings, paths = read_arguments(_ARGUMENTS, words)
    texts_by_name = dict(vars(settings))
    tool = texts_by_name.pop("tool")
    typed = {"K" if name == "k" else name: texts for name, texts in texts_by_name.items() if texts}
    if paths or not typed:
        raise SettingError("audit", f"takes figures, as a table has them in a row: {_EXAMPLE}")
    rows = stated_rows(typed, tool)
    judged = [claim for row in rows for claim in judge(row)]
    print_document(in_full(audit_page(rows, judged)), plain_console(WIDE))
    if not judged:
        raise VerdictError("nothing could be checked: too little is stated", CANNOT_TELL)
    worst = max(judged, key=lambda claim: VERDICTS.index(claim.verdict))
    if worst.verdict != "consistent":
        raise VerdictError(str(worst), 1 if worst.verdict == "impossible" else CANNOT_TELL)


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
    iterations = [row.iterations[0] for row in rows]
    others = [*filter(None, (row.other_readings for row in rows))]
    table = Table.of("costs", "", iterations, _COLUMNS, notes=tuple(others), look="plain")
    steps = [_ON_SERVER]
    if rows and not any(iteration.steps.is_known for iteration in iterations):
        steps.insert(0, NextStep("with what is missing", command=line_to_type(rows)))
    if rows and all(row.accepts_little for row in rows):
        steps.insert(0, _WHY_LOW)
    heading = f"figures · {counted(len(stated), 'row')} with speculation"
    return Page(heading, finding, tables=[table] if rows else (), next=steps)
