"""From a text, or typed figures, to rows; and the line to type in place of a table that is not read."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.commands.audit.rows import (
    AuditRow,
    difference,
    speculative_rows,
)
from harness.config.errors import SettingError
from harness.results.printed.columns import PrintedColumn
from harness.results.printed.figures import NUMBERS, SETTINGS
from harness.results.printed.reader import PrintedTable, read_tables, row_of

NAMES = (*NUMBERS, *SETTINGS)
SHORT_NAMES = {
    "baseline": "regular_tokens_per_second",
    "speed": "tokens_per_second",
    "speedup": "speedup",
    "acceptance": "acceptance_rate",
    "length": "tokens_per_iteration",
    "K": "num_draft_tokens",
}
# What to type in place of a text that is not read.
FORMS = (
    "a table with a row for each arm and a column for each figure (audit table.md; CSV, TSV, columns by spaces), a"
    " result file of vllm bench serve, SGLang's bench_serving, AIPerf or guidellm (audit with.json"
    " baseline=without.json), or figures (audit baseline=22.7 speed=40.6 acceptance=73.9% K=3)"
)
# Figures of a cell that holds several, `22.7 → 40.6` or `161.2 t/s @ 73.9%`, by their short name: for a line to type.
_IN_CELLS = {
    "baseline": r"([\d.]+)\S* (?:→|->)",
    "speed": r"((?<=→ )[\d.]+|[\d.]+(?= ?t\w*/s\S* @))",
    "acceptance": r"@ ([\d.]+ ?%)",
}
_RULE = (
    "must be a number or a range, in its own unit: a share as 72% or 0.72, a speed in tokens/s, a time per token as"
    " ms_per_token=22 and regular_ms_per_token=33"
)
# Columns and cells of a note.
_MOST_NAMED = 8


class AuditedText(NamedTuple):
    """The statements of a text.

    Attributes:
        tables: the rows of each table that has a figure.
        notes: what columns were read as, the others, and cells that are not read.
    """

    tables: list[list[AuditRow]]
    notes: list[str]

    @property
    def rows(self) -> list[AuditRow]:
        return [row for table in self.tables for row in table]


def stated_rows(typed: Mapping[str, str]) -> list[AuditRow]:
    """Rows by arguments, whose values are apart by commas; one value holds for all rows.

    Raises:
        SettingError: one is no such number, or they are of different numbers of rows.
    """
    columns = {name: PrintedColumn(SHORT_NAMES.get(name, name)) for name in typed}
    values = {name: text.split(",") for name, text in typed.items()}
    number = max(map(len, values.values()), default=1)
    rows = []
    for place in range(number):
        cells = {name: texts[min(place, len(texts) - 1)] for name, texts in values.items()}
        row = row_of(
            "the figure" if number == 1 else f"row {place + 1}", cells, columns, AuditRow("")
        )
        for name, text in row.unread.items():
            rule = _RULE
            if name == "speedup" and "%" in text:
                rule = f"may be a part: write +{text} for a gain"
            as_typed = next(each for each, column in columns.items() if column.name == name)
            raise SettingError(as_typed, rule, text[:40])
        rows.append(row)
    for name, texts in values.items():
        if len(texts) not in (1, number):
            raise SettingError(
                name, f"must have one value, or one for each of {number} rows", typed[name]
            )
    return rows


def read_text(
    text: str,
    known: Mapping[str, str],
    everywhere: AuditRow,
    title: str,
    regular: Sequence[AuditRow] = (),
) -> AuditedText:
    """The tables of a text, or the runs of a result file.

    Args:
        known: our names of what columns hold, by heading, for headings that are not known.
        everywhere: what holds for all rows.
        title: of the text.
        regular: rows of the regular arm, from another text.

    Raises:
        SettingError: there is none, or none has a figure, or the regular arm is another model's.
    """
    reading = AuditedText([], [])
    tables = read_tables(text, NAMES, known, everywhere)
    all_rows: list[AuditRow] = []
    for table in tables:
        rows = speculative_rows([*regular, *table.rows])
        all_rows += rows
        if any(map(has_figures, rows)):
            reading.tables.append(rows)
            reading.notes.extend(_notes(table))
    if regular and all_rows and not any(row.speedup.is_known for row in all_rows):
        different = filter(None, (difference(row, arm) for row in all_rows for arm in regular))
        raise SettingError(
            "baseline", f"is no arm of the same runs: {next(different, 'several fit')}"
        )
    if not tables:
        raise SettingError(title, f"has no table that is read; audit reads {FORMS}")
    if not reading.tables:
        table = max(tables, key=lambda table: len(table.columns))
        lacks = "has no acceptance, length, speed-up or speed of both arms in a row for each arm"
        notes = "; ".join(_notes(table))
        raise SettingError(title, f"{lacks}; {notes}; type them: {typed_line(table.rows)}")
    return reading


def typed_line(rows: Sequence[AuditRow]) -> str:
    """The command line with the figures of the first row that states most, and NUMBER for what it lacks."""
    row = max(rows, key=lambda row: (not row.is_regular, len(row.figures)))
    numbers = {short: number for short in SHORT_NAMES if (number := _number(row, short))}
    for short, pattern in _IN_CELLS.items():
        if match := re.search(pattern, " ".join(row.cells.values())):
            numbers.setdefault(short, match[1])
    arms = [arm for arm in rows if arm.is_regular and not difference(row, arm)]
    if speeds := [speed for arm in arms if (speed := _number(arm, "speed"))]:
        numbers.setdefault("baseline", ",".join(speeds))
    needed = {"K", "length" if "length" in numbers else "acceptance"}
    if "baseline" in numbers or "speedup" not in numbers:
        numbers.pop("speedup", None)
        needed |= {"baseline", "speed"}
    words = [
        f"{short}={numbers.get(short, 'NUMBER')}"
        for short in SHORT_NAMES
        if short in needed | numbers.keys()
    ]
    return f"harness audit {' '.join(words)}"


def _number(row: AuditRow, short: str) -> str:
    figure = row.figure(SHORT_NAMES[short])
    return f"{figure.middle:.5g}" if figure.is_known else ""


def has_figures(row: AuditRow) -> bool:
    """Whether it has a figure of speculation, or the speeds of both arms."""
    claims = ("tokens_per_iteration", "acceptance_rate")
    return row.speedup.is_known or any(name in row.figures for name in claims)


def _notes(table: PrintedTable) -> list[str]:
    """What columns were read as, the others, and cells that are not read."""
    columns = table.columns
    meant = [
        f"{heading} → {column}" for heading, column in columns.items() if column.name != "name"
    ]
    if any(row.k_is_in_words for row in table.rows):
        meant.append("words of an arm → num_draft_tokens")
    notes = [f"read: {' · '.join(meant) or 'no column'}"]
    if others := [heading for heading in table.rows[0].cells if heading and heading not in columns]:
        argument = f"columns={json.dumps({others[0]: 'NAME'}, ensure_ascii=False)}"
        notes.append(f"not read: {_listed(others)} ({shlex.quote(argument)} reads one)")
    for name in dict.fromkeys(column.name for column in columns.values()):
        if odd := [row.unread[name] for row in table.rows if name in row.unread]:
            notes.append(f"no {name} that is read: {_listed(odd)}")
    return notes


def _listed(texts: Sequence[str]) -> str:
    more = f", {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(text[:40] for text in texts[:_MOST_NAMED]) + more
