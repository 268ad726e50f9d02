"""`audit`: what an iteration costs by published figures, and whether these are possible."""

from __future__ import annotations

import sys
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.commands.arguments import read_arguments
from harness.commands.audit.judge import VERDICTS, judge
from harness.commands.audit.page import audit_page
from harness.commands.audit.texts import (
    FORMS,
    SHORT_NAMES,
    AuditedText,
    read_text,
    stated_rows,
)
from harness.config.command_line import Words
from harness.config.errors import CANNOT_TELL, SettingError, VerdictError
from harness.reporting.page import in_full
from harness.reporting.terminal import WIDE, plain_console, print_document
from harness.results.printed.figures import NUMBERS

_HELP = f"""\
usage: harness audit FILE|- [columns={{HEADING: NAME, ...}}] [NAME=VALUE ...]
       harness audit WITH.json baseline=WITHOUT.json
       harness audit baseline=22.7 speed=40.6 acceptance=73.9% K=3
       harness audit baseline=130.9 speed=161.2 acceptance=73.9% K=3 speed=118.8 acceptance=52.1% K=4

What does an iteration cost by a published table, what holds the speed-up back, and is each figure possible, given the
others? Nothing is run.

  FILE           a table in Markdown, CSV, TSV or columns by spaces, of headings that docs/audit.md lists; or a result
                 file of vllm bench serve, SGLang's bench_serving, AIPerf or guidellm
  -              the same from standard input: paste a table, then Ctrl-D
  columns={{...}}  our NAME of what columns hold, also draft (names the arm), condition (which rows must share to be
                 compared: any heading that is not known) and unused
  NAME=VALUE     without a file the figures: a NAME that is typed again is the next row's, one value holds for all
                 rows; with a file what holds for all of its rows
  regular=       the cell of a table that names the regular arm, where that is none of the words in docs/audit.md
  baseline=      speed of the regular arm, in tokens/s or as 24.6ms (per token) or 41s (per answer); or its result file

A claim is consistent, impossible or unlikely (chance, or another average, definition or run may explain it). One that
the table lacks figures to check against is not counted.

NAME of a number: {" ".join(NUMBERS)}
Short for some:   {" ".join(SHORT_NAMES)}

  harness audit - < thread.md
  harness audit theirs.csv 'columns={{avg: tokens_per_iteration, "speed": tokens_per_second}}'

Exit code 0: something was checked, and nothing is impossible or unlikely. 1: something is impossible. 2: a wrong
argument, or no figures. 3: something is unlikely, or nothing could be checked."""
_LISTS = dict.fromkeys((*SHORT_NAMES, *NUMBERS, "k"))
_ARGUMENTS: type[Any] = make_dataclass(
    "AuditSettings",
    [
        *((name, list[str], field(default_factory=list)) for name in _LISTS),
        ("columns", str, "{}"),
        ("regular", str, ""),
    ],
)


def main(words: Words) -> None:
    """The command `audit`.

    Raises:
        SettingError: a wrong argument, or a text that is not read.
        VerdictError: a claim is impossible (exit code 1), or unlikely, or none could be checked (3).
    """
    settings, paths = read_arguments(_ARGUMENTS, words, _HELP)
    typed = {"K" if name == "k" else name: texts for name, texts in vars(settings).items() if texts}
    named, regular_arm = _columns(typed.pop("columns")), typed.pop("regular", "")
    regular_file = ""
    if typed.get("baseline", [""])[0].endswith((".json", ".jsonl")):
        regular_file = _text_of(typed.pop("baseline")[0])
    stated = stated_rows(typed)
    title, reading = "figures", AuditedText(stated, [])
    if paths or named or regular_arm or not typed:
        if len(paths) != 1 or len(stated) > 1:
            rule = "takes one file with one value of each NAME, or figures"
            raise SettingError("audit", f"{rule}; it reads {FORMS}")
        title = "standard input" if paths[0] == "-" else Path(paths[0]).name
        everywhere = stated[0].figures
        text = _text_of(paths[0])
        reading = read_text(title, text, named, everywhere, regular_arm, regular_file)
    judged = [claim for row in reading.rows for claim in judge(row)]
    print_document(in_full(audit_page(title, reading, judged)), plain_console(WIDE))
    if not judged:
        raise VerdictError("nothing could be checked: too little is stated", CANNOT_TELL)
    worst = max(judged, key=lambda claim: VERDICTS.index(claim.verdict))
    if worst.verdict != "consistent":
        raise VerdictError(str(worst), 1 if worst.verdict == "impossible" else CANNOT_TELL)


def _columns(typed: str) -> dict[str, str]:
    try:
        columns = yaml.load(typed, yaml.BaseLoader)
        return {heading: SHORT_NAMES.get(name) or name for heading, name in columns.items()}
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        rule = "must be {HEADING: NAME, ...}, in quotes for the shell"
        raise SettingError("columns", rule) from error


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
