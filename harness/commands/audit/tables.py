"""From the cells of a text, or typed figures, to rows with our names."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from harness.commands.audit.figures import (
    CLAIMS,
    MARKS,
    NAMES,
    SETTINGS,
    SPEEDS,
    Figure,
    is_regular_arm,
)
from harness.commands.audit.formats import Cells, tables_of
from harness.commands.audit.headings import is_in_percent, is_turned, names_of_columns, plain
from harness.commands.audit.rows import Row, computed_speedups, speculative_rows
from harness.config.errors import SettingError, nearest

# What to type in place of a text that is not read.
FORMS = (
    "reads a table (audit table.md; CSV, TSV, columns by spaces), a result file of vllm bench serve, SGLang's"
    " bench_serving, AIPerf or guidellm (audit with.json baseline=without.json), or bare figures"
    " (audit speedup=1.4 K=3 acceptance=0.7)"
)
# K inside the words of an arm: `MTP n=3`, `draft-max 8`, `MTP, block 4`, `5 draft tokens`.
_K_IN_WORDS = re.compile(
    r"[\s,(`]*(?:(?<![\w-])(?:(?:k|n|γ|gamma|mtp)\s*=|(?:n[-_ ]?max|spec-draft-n-max|draft[-_ ]?max|depth|block"
    r"|num_speculative_tokens)\s*[=:\s])\s*(\d{1,2})\b|\b(\d{1,2}) (?:draft|speculative) tokens)[)`]?",
    re.IGNORECASE,
)
# Columns and cells of a note.
_MOST_NAMED = 8


class Reading(NamedTuple):
    """The statements of a text.

    Attributes:
        tables: the rows of each table that has a figure.
        notes: what columns were read as, the others, and cells that are not read.
    """

    tables: list[list[Row]]
    notes: list[str]

    @property
    def rows(self) -> list[Row]:
        return [row for table in self.tables for row in table]

    @property
    def computed(self) -> set[str]:
        """Places of rows whose speed-up was computed from the acceptance."""
        return computed_speedups(self.tables)


def stated_row(cells: Cells) -> Row:
    """A row by arguments.

    Raises:
        SettingError: one is no such number.
    """
    row, unread = _row("the figure", cells, Row(""))
    for name, text in unread.items():
        raise SettingError(name, "must be a number, with its unit, or a range", text[:40])
    return row


def read_text(
    text: str, columns: Cells, everywhere: Row, title: str, regular: Sequence[Row] = ()
) -> Reading:
    """The tables of a text, or the runs of a result file.

    Args:
        columns: our names of what columns hold, by heading, for headings that are not known.
        everywhere: what holds for all rows.
        title: of the text.
        regular: rows of the regular arm, from another text.

    Raises:
        SettingError: there is none, or none has a figure.
    """
    raw = tables_of(text)
    headings = [heading for table in raw for heading in table[0] if heading]
    for heading, name in columns.items():
        if heading not in headings:
            rule = f"no table has this column{nearest(heading, headings)}; there are {', '.join(headings)}"
            raise SettingError("columns", rule, heading)
        if name not in NAMES:
            raise SettingError("columns", f"no such NAME{nearest(name, NAMES)} (--help)", name)
    reading = Reading([], [])
    for number, table in enumerate(raw, start=1):
        typed = [name for heading, name in columns.items() if heading in table[0]]
        if len(set(typed)) < len(typed):
            raise SettingError("columns", f"must give each NAME to one column: {', '.join(typed)}")
        where = f"table {number}, row" if len(raw) > 1 else "row"
        rows, notes = rows_of_table(table, columns, everywhere, where)
        joined = speculative_rows([*regular, *rows])
        if any(map(_has_figures, joined)):
            reading.tables.append(joined)
            reading.notes.extend(notes)
    if reading.tables:
        return reading
    rule = f"has no table that is read; audit {FORMS}"
    if any(map(is_turned, raw)):
        rule = "has a row for each figure: turn it, so that each arm has a row and each figure a column"
    elif headings:
        figures = "acceptance, length, speed-up or speed of both arms"
        rule = f"has no {figures} in columns that are known: {_unread(headings)}"
    raise SettingError(title, rule)


def rows_of_table(
    rows: Sequence[Cells], columns: Cells, everywhere: Row, where: str = "row"
) -> tuple[list[Row], list[str]]:
    """The rows of a table, and sentences about what was read of it and what was not."""
    names = names_of_columns(rows, columns)
    in_percent = {
        name
        for heading, name in names.items()
        if is_in_percent(name, plain(heading), [row[heading].strip(MARKS) for row in rows])
    }
    stated = []
    odd: dict[str, list[str]] = defaultdict(list)
    for number, cells in enumerate(rows, start=1):
        named = {name: cells[heading] for heading, name in names.items()}
        row, unread = _row(f"{where} {number}", named, everywhere, in_percent)
        stated.append(row)
        for name, text in unread.items():
            odd[name].append(text)
    meant = [f"{heading} → {name}" for heading, name in names.items() if name != "name"]
    if any(row.k_is_in_words for row in stated):
        meant.append("words of an arm → num_draft_tokens")
    notes = [f"read: {' · '.join(meant)}"]
    if others := [heading for heading in rows[0] if heading not in names and heading]:
        notes.append(f"not read: {_unread(others)}")
    notes += [f"no {name} that is read: {_listed(texts)}" for name, texts in odd.items()]
    gains = [row.figures["speedup"].text for row in stated if "speedup" in row.figures]
    if any("slower" in gain or gain.startswith("-") for gain in gains):
        notes.append("50 % slower is read as 0.50× the tokens/s; in time it would be 0.67×")
    return stated, notes


def _has_figures(row: Row) -> bool:
    """Whether it has a figure of speculation, or the speeds of both arms."""
    both = any({name, f"regular_{name}"} <= row.figures.keys() for name in SPEEDS)
    return both or not CLAIMS.keys().isdisjoint(row.figures)


def _listed(texts: Sequence[str]) -> str:
    more = f", {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(text[:40] for text in texts[:_MOST_NAMED]) + more


def _unread(headings: Sequence[str]) -> str:
    """The headings, and the argument that names the first column."""
    argument = f"columns={json.dumps({headings[0]: 'NAME'}, ensure_ascii=False)}"
    return f"{_listed(headings)} ({shlex.quote(argument)} reads one)"


def _row(
    place: str, cells: Cells, everywhere: Row, in_percent: Collection[str] = ()
) -> tuple[Row, dict[str, str]]:
    """A row by cells with our names, and those cells that are no such number."""
    settings, figures = dict(everywhere.settings), dict(everywhere.figures)
    unread = {}
    for name, text in cells.items():
        is_none = text.strip(MARKS).lower() == "n/a"
        if name in SETTINGS:
            if text:
                settings[name] = "none" if name == "draft" and is_none else text
        elif name == "num_draft_tokens" and (is_none or is_regular_arm(text)):
            figures[name] = Figure(0, 0, text)
        else:
            try:
                figure = Figure.read(name, text, name in in_percent)
            except ValueError:
                unread[name] = text
                continue
            if figure is not None:
                figures[name] = figure
    row = Row(place, settings, figures)
    for name in ("draft", "name"):
        text = settings.get(name, "")
        matches = [*_K_IN_WORDS.finditer(text)]
        # `K=5 / K=3` is ambiguous.
        if len(matches) == 1 and "num_draft_tokens" not in figures and not row.is_regular:
            match = matches[0]
            settings[name] = f"{text[: match.start()]}{text[match.end() :]}".strip()
            k = float(match[1] or match[2])
            figures["num_draft_tokens"] = Figure(k, k, f"{k:g}")
            row = Row(place, settings, figures, k_is_in_words=True)
    return row, unread
