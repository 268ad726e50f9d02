"""From a text, or typed figures, to rows with both arms' speeds; and the line to type in place of what is not read."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.config.errors import SettingError, nearest
from harness.results.printed.cells import Cells
from harness.results.printed.figures import NUMBERS, SPEEDS, UNKNOWN, PrintedFigure, is_stated
from harness.results.printed.headings import ARM, CONDITION, UNUSED
from harness.results.printed.reader import PrintedTable, read_tables
from harness.results.printed.rows import PrintedRow

SHORT_NAMES = {
    "baseline": "regular_tokens_per_second",
    "speed": "tokens_per_second",
    "speedup": "speedup",
    "acceptance": "acceptance_rate",
    "length": "tokens_per_iteration",
    "K": "num_draft_tokens",
}
# Speeds that are typed as 24.6ms or 41s.
_SPEEDS_BY_UNIT = {"ms": "ms_per_token", "s": "latency_s"}
_NAMES = (*NUMBERS, ARM, CONDITION, UNUSED)
# How far the lengths of prompts and answers of two arms may be apart.
_SAME_LENGTH = 1.1
# What to type in place of a text that is not read.
FORMS = (
    "a table with a row for each arm and a column for each figure (audit table.md; CSV, TSV, columns by spaces), a"
    " result file of vllm bench serve, SGLang's bench_serving, AIPerf or guidellm (audit with.json"
    " baseline=without.json), or figures (audit baseline=22.7 speed=40.6 acceptance=73.9% K=3)"
)


class AuditedText(NamedTuple):
    """The rows with speculation, and notes: what columns were read as, and what is not compared."""

    rows: list[PrintedRow]
    notes: list[str]


def stated_rows(typed: Mapping[str, Sequence[str]]) -> list[PrintedRow]:
    """Rows by arguments; what is typed once holds for all rows.

    Raises:
        SettingError: one is no such number, or they are of different numbers of rows.
    """
    number = max(map(len, typed.values()), default=1)
    rows = []
    for place in range(number):
        row = PrintedRow("the figure" if number == 1 else f"row {place + 1}")
        for short, texts in typed.items():
            if len(texts) not in (1, number):
                rule = f"must have one value, or one for each of {number} rows"
                raise SettingError(short, rule, " and ".join(texts))
            text = texts[place % len(texts)]
            name = SHORT_NAMES.get(short, short)
            unit = re.search(r"\d\s*(ms|s)\b", text)
            if unit and short in ("baseline", "speed"):
                name = name.replace("tokens_per_second", _SPEEDS_BY_UNIT[unit[1]])
            try:
                row.figures[name] = PrintedFigure.read(name, text) or UNKNOWN
            except ValueError as error:
                forms = "write 40.6, 24.6ms, 73.9%, 1.79x or +79%, and type a name again for another row"
                raise SettingError(short, f"{error}; {forms}", text[:40]) from error
        rows.append(row)
    return rows


def read_text(
    title: str,
    text: str,
    named: Cells,
    everywhere: Mapping[str, PrintedFigure],
    regular_arm: str = "",
    regular_file: str = "",
) -> AuditedText:
    """The tables of a text, or the runs of a result file.

    Args:
        title: of the text.
        named: our names of what columns hold, by heading.
        everywhere: figures of all rows.
        regular_arm: a cell that names it.
        regular_file: its result file.

    Raises:
        SettingError: there is none, or none has a figure.
    """
    try:
        tables = read_tables(title, text, _NAMES, named, regular_arm, regular_file)
    except SettingError as error:
        raise SettingError(title, f"{error.rule}, or type a row: {line_to_type([])}") from error
    headings = [heading for table in tables for heading in table.columns]
    for heading, name in named.items():
        if heading not in headings:
            rule = f"no table has this column{nearest(heading, headings)}; there are {', '.join(headings)}"
            raise SettingError("columns", rule, heading)
        if name not in _NAMES:
            raise SettingError("columns", f"no such NAME{nearest(name, _NAMES)} (--help)", name)
    if not tables:
        raise SettingError(title, f"has no table that is read; audit reads {FORMS}")
    cells = {cell for table in tables for row in table.rows for cell in row.cells.values()}
    if regular_arm and regular_arm not in cells:
        rule = f"no table has this cell{nearest(regular_arm, cells)}"
        raise SettingError("regular", rule, regular_arm)
    read = AuditedText([], [])
    for table in tables:
        rows, reason = _compared(table, everywhere, "speedup" in named.values())
        if len(tables) == 1 or any(row.is_read for row in rows):
            read.rows.extend(rows)
            read.notes.extend([*_notes(table), *filter(None, [reason])])
    if regular_file and not any(row.speedups for row in read.rows):
        raise SettingError("baseline", read.notes[-1])
    if not any(row.is_read for row in read.rows):
        lacks = (
            "has no acceptance, length, speed-up or speed of both arms in columns that are known"
        )
        notes = "; ".join([lacks, *read.notes])
        raise SettingError(title, f"{notes}; or type a row: {line_to_type(read.rows)}")
    return read


def _compared(
    table: PrintedTable, everywhere: Mapping[str, PrintedFigure], has_arm: bool
) -> tuple[list[PrintedRow], str]:
    """The rows with speculation, each with the speeds of the one regular row that has its conditions; and why one is
    not compared.

    Args:
        has_arm: whether the user says that speed-ups are over the regular arm.
    """
    arms = [row for row in table.rows if row.is_regular]
    ratios = [arm.figures["speedup"] for arm in arms if "speedup" in arm.figures]
    # Else that of the table counts, if it is one.
    has_arm |= bool(arms) and all(ratio.low <= 1 <= ratio.high for ratio in ratios)
    has_arm |= any(column.name.startswith("regular_") for column in table.columns.values())
    rows = []
    reason = ""
    for row in table.rows:
        if row.is_regular:
            continue
        alike = [arm for arm in arms if not _differences(row, arm)]
        figures = {**everywhere, **row.figures}
        if "speedup" in row.figures and not has_arm:
            del figures["speedup"]
            argument = _columns({"HEADING": "speedup"})
            reason = f"not read: a speed-up over a regular arm that the table lacks; {argument} says that it is over it"
        if len(alike) == 1:
            for name in SPEEDS.keys() & alike[0].figures.keys():
                figures.setdefault(f"regular_{name}", alike[0].figures[name])
        rows.append(replace(row, figures=figures))
        if SPEEDS.keys() & figures.keys() and not rows[-1].speedups:
            reason = reason or _why_not_compared(row, alike or arms)
    return rows, reason


def _differences(row: PrintedRow, arm: PrintedRow) -> dict[str, str]:
    """The conditions in which two rows differ, each with both values; what only one of them states is the same."""
    differences = {}
    for name, text in row.conditions.items():
        other = arm.conditions.get(name, text)
        if text != other and is_stated(text) and is_stated(other):
            differences[name] = f"{text} and {other}"
    for name in ("batch_size", "input_tokens", "output_tokens"):
        ours, theirs = row.figure(name), arm.figure(name)
        is_load = name == "batch_size"
        apart = max(ours.low / theirs.high, theirs.low / ours.high)
        # Lengths may be a little apart; a load that only one states is another one.
        if apart > _SAME_LENGTH or (is_load and ours.text != theirs.text):
            differences[name] = f"{ours.text or 'unknown'} and {theirs.text or 'unknown'}"
    return differences


def _why_not_compared(row: PrintedRow, arms: Sequence[PrintedRow]) -> str:
    """What a row and the regular row most like it differ in, or that there are two, or none."""
    if not arms:
        return (
            "not compared: no row is the regular arm (baseline, none, K=0); regular=CELL names it"
        )
    arm = min(arms, key=lambda arm: len(_differences(row, arm)))
    differences = _differences(row, arm)
    if not differences:
        places = " and ".join(arm.place for arm in arms)
        return f"not compared: {places} are regular, and which one is the arm of {row.place} is not stated"
    values = ", ".join(f"{name} {both}" for name, both in differences.items())
    argument = _columns({name: UNUSED for name in differences if name in row.conditions})
    return f"not compared: {row.place} and regular {arm.place} differ in {values}; if that is no condition: {argument}"


def _columns(names: Cells) -> str:
    """`'columns={"ctx": "unused"}'`."""
    return shlex.quote(f"columns={json.dumps(names, ensure_ascii=False)}")


def line_to_type(rows: Sequence[PrintedRow]) -> str:
    """The command line with the figures of the row that states most, and NUMBER for what it lacks."""
    row = max(rows, key=lambda row: len(row.figures), default=PrintedRow(""))
    speed = next((name for name in SPEEDS if name in row.figures), "tokens_per_second")
    is_length = "tokens_per_iteration" in row.figures
    yields = "tokens_per_iteration" if is_length else "acceptance_rate"
    shorts = {name: short for short, name in SHORT_NAMES.items()}
    words = ["harness audit"]
    for name in (f"regular_{speed}", speed, yields, "num_draft_tokens"):
        number = f"{row.figures[name].middle:.5g}" if name in row.figures else "NUMBER"
        words.append(f"{shorts.get(name, name)}={number}")
    return " ".join(words)


def _notes(table: PrintedTable) -> list[str]:
    """What columns were read as, and the others."""
    read, others = [], []
    for heading, column in table.columns.items():
        if column.name in (CONDITION, UNUSED):
            others.append(heading)
        else:
            read.append(f"{heading} → {column.name}")
    notes = [f"read: {' · '.join(read) or 'no column'}"]
    if others := [*filter(None, others)]:
        notes.append(f"not read: {', '.join(others)} ({_columns({others[0]: 'NAME'})} reads one)")
    return notes
