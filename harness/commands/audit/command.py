"""`audit`: whether published figures are possible, and the command that repeats them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from harness.commands.audit.tables import read_tables
from harness.config.amounts import counted
from harness.config.errors import SettingError, VerdictError, nearest
from harness.config.sizes import CONF
from harness.reporting.page import Page, Step, in_full, in_short
from harness.reporting.table import Column, Line, Table, TableRow
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.results.claims import CLAIMS, NAMES, NUMBERS, SETTINGS, VERDICTS, Judged, Stated, judge
from harness.results.runs import grouped

_HELP = f"""\
usage: harness audit FILE [columns={{HEADING: NAME, ...}}] [NAME=VALUE ...] [details=true]

Is each figure of a published table possible, given the others? Nothing is run.

  FILE           .csv, .json or .yaml; of any other file all Markdown tables that have a claim
  columns={{...}}  our NAME of what columns hold whose headings are not known
  NAME=VALUE     what the text around a table states for all rows
  details=true   every claim with its reason, and the commands that repeat them

A claim is consistent, impossible, unlikely (chance, or another average, definition or run may explain it), or not
stated: the table lacks what it could be checked against.

NAME of a number:  {" ".join(NUMBERS)}
NAME of a setting: {" ".join(SETTINGS)}

  harness audit README.md
  harness audit dsv4_mtp.yaml num_prompts=80 temperature=1 draft=mtp
  harness audit theirs.csv 'columns={{avg: tokens_per_iteration, "t/s": tokens_per_second}}'

Exit code 0: nothing is impossible or unlikely. 1: something is impossible. 2: a wrong argument, or no table. 3: something is unlikely, or nothing could be checked."""
# Names with which a command repeats a claim.
_TYPED = {
    "model": "model",
    "draft": "draft",
    "prompts": "prompts",
    "num_prompts": "num_prompts",
    "temperature": "temperature",
    "max_new_tokens": "tokens",
    "batch_size": "batch_size",
}
_TIMED = {"speedup", "tokens_per_second", "ms_per_token", "latency_s"}


def main(arguments: Sequence[str]) -> None:
    """The command `audit`.

    Raises:
        SettingError: a wrong argument, or a table that cannot be read.
        VerdictError: a claim is impossible (exit code 1), or unlikely, or none could be checked (3).
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(_HELP)
        return
    given = dict(argument.split("=", 1) for argument in arguments if re.match(r"\w+=", argument))
    paths = [argument for argument in arguments if not re.match(r"\w+=", argument)]
    if len(paths) != 1:
        raise SettingError("audit", f"takes one file with a table, not {len(paths)} (--help)")
    details = given.pop("details", "false")
    if details not in ("true", "false"):
        raise SettingError("details", "must be true or false", details)
    try:
        columns = yaml.load(given.pop("columns", "{}"), yaml.BaseLoader)
    except yaml.YAMLError:
        columns = None
    if not isinstance(columns, dict) or not all(
        name and isinstance(name, str) for name in columns.values()
    ):
        raise SettingError("columns", "must be {HEADING: NAME, ...}, in quotes for the shell")
    for name in given:
        if name not in NAMES:
            known = (*NAMES, "columns", "details")
            raise SettingError(name, f"no such argument{nearest(name, known)} (--help)")
    tables, notes = read_tables(Path(paths[0]), columns, given)
    judged = [one for table in tables for one in judge(table)]
    page = page_of_claims(Path(paths[0]).name, tables, judged, notes)
    print_document(in_full(page) if details == "true" else in_short(page), plain_console(WIDE))
    verdicts = {one.verdict for one in judged}
    if not {"impossible", "unlikely"}.isdisjoint(verdicts):
        raise VerdictError(page.finding[1].text, 1 if "impossible" in verdicts else 3)
    if "consistent" not in verdicts:
        raise VerdictError("nothing could be checked: the table states too little", 3)


def page_of_claims(
    title: str,
    tables: Sequence[Sequence[Stated]],
    judged: Sequence[Judged],
    notes: Sequence[str],
) -> Page:
    """The verdicts on all claims of a file, the worst first, and the commands that repeat them."""
    rows = [row for table in tables for row in table]
    by_verdict = grouped(judged, lambda one: one.verdict)
    worst_first = [verdict for verdict in reversed(VERDICTS) if verdict in by_verdict]
    numbers = ", ".join(f"{len(by_verdict[verdict])} {verdict}" for verdict in worst_first)
    finding = [Line(f"{counted(len(judged), 'claim')}: {numbers}", "strong")]
    for verdict in ("impossible", "unlikely"):
        for one in by_verdict.get(verdict, ()):
            claim = f"{CLAIMS[one.figure]} {one.printed}"
            finding.append(Line(f"{verdict}: {_label(one.row)}: {claim} {one.reason}"))
    unstated = grouped(by_verdict.get("not stated", ()), lambda one: (one.figure, one.reason))
    for (figure, reason), ones in unstated.items():
        finding.append(Line(f"not stated ({len(ones)}): {CLAIMS[figure]} {reason}", "dim"))
    finding += [Line(note, "dim") for note in notes]
    counts = Counter((CLAIMS[one.figure], one.verdict) for one in judged)
    tallied = [
        TableRow((figure, *(counts[figure, verdict] or None for verdict in worst_first)))
        for figure in CLAIMS.values()
        if any(counts[figure, verdict] for verdict in worst_first)
    ]
    headings = [Column("", text=True), *map(Column, worst_first)]
    tally = Table("tally", "", tuple(headings), tuple(tallied), look="bare")
    columns = (
        Column("row", of=lambda one: _label(one.row), text=True, once=True),
        Column("claim", of=lambda one: f"{CLAIMS[one.figure]} {one.printed}", text=True),
        Column("verdict", of="verdict", text=True),
        Column("because it", of="reason", text=True),
    )
    claims = Table.of("claims", "Claims", judged, columns)
    commands = _commands([row for row in rows if not row.is_regular])
    steps = [Step("to repeat it", command=command) for command in commands]
    lines = [
        line for command, about in commands.items() for line in (("run", command), ("", about))
    ]
    repeated = Table.of_lines("commands", lines, "Commands that repeat the claims")
    num_read = sum(map(bool, tables))
    read = f"{title} · {num_read} of {counted(len(tables), 'table')} · {counted(len(rows), 'row')}"
    return Page(read, finding, tables=[tally, claims, repeated], next=steps)


def _label(row: Stated) -> str:
    """`row 7 (dsv4 thinking_off, K=7)`."""
    k = row.numbers.get("num_draft_tokens")
    about = [row.settings.get("name", row.settings.get("draft")), row.settings.get("prompts")]
    about += [k and f"K={k.text}"]
    return f"{row.place} ({', '.join(filter(None, about))})" if any(about) else row.place


def _commands(rows: Sequence[Stated]) -> dict[str, str]:
    """The command that repeats each curve over K, with where it ran and what the table leaves open."""
    commands = {}
    for settings, curve in grouped(rows, _typed).items():
        ks = [row.numbers["num_draft_tokens"] for row in curve if "num_draft_tokens" in row.numbers]
        typed = [f"{name}={value}" for name, value in settings]
        words = ["harness", "latency", *typed]
        if ks and not any(_TIMED & row.numbers.keys() for row in curve):
            # It has every K from one pass.
            words = ["harness", "acceptance", *typed, f"up_to={max(ks).text}"]
        elif ks:
            words.append(f"K={','.join(dict.fromkeys(k.text for k in ks))}")
            words[2:2] = ["-m"] if "," in words[-1] else []
        if ks or "model" in dict(settings):
            left_open = [name for name in _TYPED.values() if name not in dict(settings)]
            devices = curve[0].settings.get("devices", "devices that are not stated")
            commands[" ".join(words)] = (
                f"on {devices}; left open: {', '.join(left_open) or 'nothing'}"
            )
    return commands


def _typed(row: Stated) -> tuple[tuple[str, str], ...]:
    """The settings of its command but K, by name, as far as they can be typed."""
    typed = {}
    for name, setting in _TYPED.items():
        number = row.numbers.get(name)
        value = row.settings.get(name, "") if number is None else number.text
        if name == "prompts":
            # `MT-Bench` is a set here.
            value = re.sub(r"\W+", "_", value.lower())
            value = value if value in {file.stem for file in (CONF / "prompts").iterdir()} else ""
        if re.fullmatch(r"[\w./+-]+", value):
            typed[setting] = value
    return tuple(typed.items())
