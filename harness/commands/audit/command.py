"""`audit`: what an iteration costs by published figures, and whether these are possible."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.commands.arguments import read_arguments
from harness.commands.audit.judge import judge
from harness.commands.audit.page import audit_page
from harness.commands.audit.rows import AuditRow, computed_speedups
from harness.commands.audit.tables import (
    FORMS,
    NAMES,
    SHORT_NAMES,
    AuditedText,
    has_figures,
    read_text,
    stated_rows,
)
from harness.config.command_line import Words
from harness.config.errors import SettingError, VerdictError
from harness.reporting.page import in_full
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.results.printed.figures import NUMBERS, SETTINGS, PrintedFigure
from harness.results.printed.reader import read_tables

_HELP = f"""\
usage: harness audit FILE|- [columns={{HEADING: NAME, ...}}] [NAME=VALUE ...]
       harness audit WITH.json baseline=WITHOUT.json
       harness audit baseline=22.7 speed=40.6 acceptance=73.9% K=3
       harness audit baseline=130.9 speed=161.2 acceptance=73.9% K=3 speed=118.8 acceptance=52.1% K=4

What does an iteration cost by a published table, what holds the speed-up back, and is each figure possible, given the
others? Nothing is run.

  FILE           a table in Markdown, CSV, TSV or columns by spaces; or a result file of vllm bench serve, SGLang's
                 bench_serving, AIPerf or guidellm
  -              the same from standard input: paste a table, then Ctrl-D
  columns={{...}}  our NAME of what columns hold whose headings are not known
  NAME=VALUE     without a file the figures: a NAME that is typed again is the next row's, one value holds for all rows
                 (commas between values do the same); with a file what holds for all of its rows
  baseline=      tokens/s of the regular arm, or its result file

A claim is consistent, impossible, unlikely (chance, or another average, definition or run may explain it), or not
stated: the table lacks what it could be checked against.

NAME of a number:  {" ".join(NUMBERS)}
NAME of a setting: {" ".join(SETTINGS)}
Short for some:    {" ".join(SHORT_NAMES)}

  harness audit - < thread.md
  harness audit theirs.csv 'columns={{avg: tokens_per_iteration, "speed": tokens_per_second}}'

Exit code 0: nothing is impossible or unlikely. 1: something is impossible. 2: a wrong argument, or no figures. 3:
something is unlikely, or nothing could be checked or explained."""
_TYPED = dict.fromkeys((*NAMES, *SHORT_NAMES, "k", "columns"))
_ARGUMENTS: type[Any] = make_dataclass("AuditSettings", [(name, str, "") for name in _TYPED])


def main(words: Words) -> None:
    """The command `audit`.

    Raises:
        SettingError: a wrong argument, or a text that is not read.
        VerdictError: a claim is impossible (exit code 1), or unlikely, or none could be checked (3).
    """
    settings, paths = read_arguments(_ARGUMENTS, words, _HELP, joins=True)
    typed = {"K" if name == "k" else name: text for name, text in vars(settings).items() if text}
    columns = _columns(typed.pop("columns", "{}"))
    regular = []
    if typed.get("baseline", "").endswith((".json", ".jsonl")):
        regular = _regular_rows(typed.pop("baseline"))
    stated = stated_rows(typed)
    title, reading = "figures", AuditedText([stated], [])
    if paths or not any(map(has_figures, stated)):
        if len(paths) != 1 or len(stated) > 1:
            raise SettingError(
                "audit", f"takes one file with one value of each NAME, or figures; it reads {FORMS}"
            )
        title = "standard input" if paths[0] == "-" else Path(paths[0]).name
        reading = read_text(_text_of(paths[0]), columns, stated[0], title, regular)
    computed = computed_speedups(reading.tables)
    judged = [claim for row in reading.rows for claim in judge(row, computed)]
    print_document(in_full(audit_page(title, reading, computed, judged)), plain_console(WIDE))
    for verdict, exit_code in (("impossible", 1), ("unlikely", 3)):
        accused = [claim for claim in judged if claim.verdict == verdict]
        if accused:
            raise VerdictError(str(accused[0]), exit_code)
    has_cost = any(row.steps.is_known for row in reading.rows)
    if not has_cost and {claim.verdict for claim in judged} == {"not stated"}:
        raise VerdictError("nothing could be checked: too little is stated", 3)


def _columns(typed: str) -> Mapping[str, str]:
    try:
        columns = yaml.load(typed, yaml.BaseLoader)
        return {heading: SHORT_NAMES.get(name, name) for heading, name in columns.items()}
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        rule = "must be {HEADING: NAME, ...}, in quotes for the shell"
        raise SettingError("columns", rule) from error


def _regular_rows(path: str) -> list[AuditRow]:
    """The runs of the regular arm's result file."""
    plain = AuditRow("", figures={"num_draft_tokens": PrintedFigure(0, 0)})
    tables = read_tables(_text_of(path), NAMES, {}, plain)
    rows = [row for table in tables for row in table.rows]
    if not rows or not all(row.is_regular for row in rows):
        raise SettingError("baseline", "must be a result file of runs that draft nothing", path)
    return rows


def _text_of(path: str) -> str:
    """Raises:
    SettingError: there is no such file, or it is no text.
    """
    title = "standard input" if path == "-" else " ".join(path.split())[:60] or "FILE"
    if path == "-" and sys.stdin.isatty():
        print("Paste a table, then Ctrl-D:", file=sys.stderr)
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = "is no text in UTF-8: save the table as CSV or Markdown"
        raise SettingError(title, rule) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file has such a name"
        raise SettingError(title, f"cannot be read ({reason}); audit reads {FORMS}") from error
