"""Tables of published figures: what each row states, with our names of what its cells are."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml

from harness.commands.audit.formats import raw_tables, why_no_table
from harness.commands.audit.headings import Cells, names_of_columns, plain
from harness.config.errors import SettingError, nearest
from harness.results.claims.stated import (
    CLAIMS,
    NAMES,
    OF_ARMS,
    OF_SPECULATION,
    RATES,
    SETTINGS,
    Printed,
    Stated,
)

# Headings below which `45 %` is 1.45×.
_IS_GAIN = re.compile(r"faster|gain|uplift|improve|[δΔ]|delta|\bvs\b|versus|over|relative")
# K inside the words of an arm: `MTP n=3`, `draft-max 8`, `MTP, block 4`, `5 draft tokens`.
_K_IN_WORDS = re.compile(
    r"[\s,(]*(?:\b(?:k|n|γ|gamma|n[-_ ]?max|spec-draft-n-max|draft[-_ ]?max|depth|block|num_speculative_tokens)"
    r"\s*[=:\s]\s*(\d{1,2})\b|\b(\d{1,2}) (?:draft|speculative) tokens)\)?",
    re.IGNORECASE,
)
# Columns and cells of a note.
_MOST_NAMED = 8
# No draft has as many accepted tokens per iteration on average.
_LONGEST = 20


class Reading(NamedTuple):
    """What a text states.

    Attributes:
        tables: rows of each; one without a claim has none.
        notes: what was not read, in sentences.
    """

    tables: list[list[Stated]]
    notes: list[str]


def read_tables(path: Path, columns: Cells, everywhere: Cells) -> Reading:
    """The tables of a file.

    Args:
        columns: our names of what columns hold, by heading, for headings that are not known.
        everywhere: what holds for all rows, by our names.

    Raises:
        SettingError: no table has a claim.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(str(path), "is no text: save the table as CSV or Markdown") from error
    return read_text(text, columns, everywhere, title=str(path), suffix=path.suffix.lower())


def read_text(
    text: str, columns: Cells, everywhere: Cells, *, title: str, suffix: str = ""
) -> Reading:
    """The tables, logs and sentences of a text; see `read_tables`."""
    try:
        tables = raw_tables(text, suffix)
    except (ValueError, csv.Error, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise SettingError(title, f"is no {suffix or 'text'} file: {reason}") from error
    headings = list(dict.fromkeys(name for table in tables for row in table.rows for name in row))
    for heading, name in columns.items():
        if heading not in headings:
            rule = f"no table has this column{nearest(heading, headings)}; there are {', '.join(headings)}"
            raise SettingError("columns", rule, heading)
        if name not in NAMES:
            raise SettingError("columns", f"no such NAME{nearest(name, NAMES)} (--help)", name)
    claims: list[list[Stated]] = []
    notes: list[str] = []
    for number, table in enumerate(tables, start=1):
        rows = [row for row in table.rows if row.get("status") != "failed"]
        if len(rows) < len(table.rows):
            notes.append(f"left out: {len(table.rows) - len(rows)} of a run that failed")
        names = names_of_columns(rows, columns)
        if rows and _num_claims(names) < 2:
            # The arms may be columns.
            turned = _transposed(rows)
            names_of_turned = names_of_columns(turned, columns)
            if _num_claims(names_of_turned) > 1:
                rows, names = turned, names_of_turned
        if CLAIMS.keys().isdisjoint(names.values()):
            claims.append([])
            continue
        where = f"table {number}, {table.row}" if len(tables) > 1 else table.row
        stated = _stated_rows(rows, names, everywhere, where, notes)
        if all(CLAIMS.keys().isdisjoint(row.numbers) for row in stated):
            claims.append([])
            continue
        claims.append(_with_regular(stated))
        unread = [heading for heading in rows[0] if heading not in names and heading.strip()]
        # Our own files have many columns that are no figures of a paper.
        if unread and "run" not in rows[0]:
            notes.append(f"not read: {_listed(unread)} (columns= names a column)")
    if not headings:
        raise SettingError(title, why_no_table(text, suffix))
    if not any(claims):
        rule = f"has no column with a claim that is known: {', '.join(headings)} (columns=, see --help)"
        raise SettingError(title, rule)
    return Reading(claims, list(dict.fromkeys(notes)))


def read_figures(stated: Cells) -> Reading:
    """Figures without a table, by our names."""
    settings: dict[str, str] = {}
    numbers: dict[str, Printed] = {}
    for name, text in stated.items():
        _state(name, text, settings, numbers, name)
    return Reading([[Stated("the figure", settings, numbers)]], [])


def _num_claims(names: Cells) -> int:
    return len(CLAIMS.keys() & set(names.values()))


def _transposed(rows: Sequence[Cells]) -> list[dict[str, str]]:
    """A table whose first column has the headings, and whose further columns are the rows."""
    first, *arms = rows[0]
    return [
        {"name": arm} | {row.get(first, ""): row.get(arm, "") for row in rows if row.get(first)}
        for arm in arms
    ]


def _listed(texts: Sequence[str]) -> str:
    shown = [" ".join(text.split())[:40] for text in texts[:_MOST_NAMED]]
    more = [f"{len(texts) - _MOST_NAMED} more"] if len(texts) > _MOST_NAMED else []
    return ", ".join([*shown, *more])


def _stated_rows(
    rows: Sequence[Cells], names: Cells, everywhere: Cells, where: str, notes: list[str]
) -> list[Stated]:
    """The rows of a table as claims; a cell that is no number is noted and left out.

    Raises:
        SettingError: a number that holds everywhere is none.
    """
    forms = {heading: _form(heading, name, rows, notes) for heading, name in names.items()}
    odd = defaultdict(list)
    stated = []
    for place, row in enumerate(rows, start=1):
        settings: dict[str, str] = {}
        numbers: dict[str, Printed] = {}
        for name, text in everywhere.items():
            _state(name, text, settings, numbers, name)
        for heading, name in names.items():
            form = forms[heading]
            text = row.get(heading, "").strip()
            if form is None:
                continue
            try:
                _state(name, form(text) if text else "", settings, numbers)
            except ValueError:
                odd[heading].append(text)
        stated.append(_with_k(Stated(f"{where} {place}", settings, numbers)))
    for heading, texts in odd.items():
        notes.append(f"no number that is read, in column {heading}: {_listed(texts)}")
    return stated


def _state(
    name: str, text: str, settings: dict[str, str], numbers: dict[str, Printed], argument: str = ""
) -> None:
    """Adds a cell, or an argument.

    Raises:
        ValueError: a cell is no number.
        SettingError: an argument is none.
    """
    if name in SETTINGS:
        if text:
            settings[name] = text
        return
    try:
        number = Printed.read(name, text)
    except ValueError as error:
        if not argument:
            raise
        rule = f"must be a number, with a unit or an interval: {text[:40]}"
        raise SettingError(argument, rule) from error
    if number is not None:
        numbers[name] = number


def _form(
    heading: str, name: str, rows: Sequence[Cells], notes: list[str]
) -> Callable[[str], str] | None:
    """How the cells of a column are read; None where it is not certain what they are."""
    cells = [row.get(heading, "").strip("*~≈ ") for row in rows]
    stated = [cell for cell in cells if Printed.is_stated(cell)]
    words = plain(heading)
    if name == "speedup" and _IS_GAIN.search(words) and not re.search("speed.?up", words):
        return _gained
    if name not in RATES or any("%" in cell for cell in stated):
        return str
    if re.search(r"%|percent|pct", words):
        return _percent
    numbers = [float(one[0]) for cell in stated if (one := re.match(r"\d*\.?\d+", cell))]
    above = [number for number in numbers if number > 1]
    if not above or (max(above) < 2 and len(above) < len(numbers)):
        return str
    if len(above) == len(numbers) and max(above) > _LONGEST:
        return _percent
    notes.append(f"not read: {heading}, which may be a rate in percent, a share or a length")
    return None


def _percent(cell: str) -> str:
    return re.sub(r"^([*~≈ ]*[-−]?[\d.,]+)(?!.*%)", r"\1 %", cell)


def _gained(cell: str) -> str:
    """`+45 %` for a gain of `45 %`.

    Raises:
        ValueError: `45`, which may be 45 % or 45×.
    """
    if re.match(r"[*~≈ ]*[\d.,]+\s*%", cell):
        return "+" + cell.lstrip("*~≈ ")
    if not re.search(r"[×xX%]", cell) and Printed.is_stated(cell):
        raise ValueError(cell)
    return cell


def _with_k(row: Stated) -> Stated:
    """The row with the K that stands in the words of its arm, `MTP n=3`."""
    if "num_draft_tokens" in row.numbers:
        return row
    for name in ("draft", "name"):
        found = _K_IN_WORDS.search(row.settings.get(name, ""))
        if found is None or row.is_regular:
            continue
        text = row.settings[name]
        settings = {**row.settings, name: (text[: found.start()] + text[found.end() :]).strip()}
        k = Printed.read("num_draft_tokens", found[1] or found[2])
        if k is not None:
            kept = {key: value for key, value in settings.items() if value}
            return replace(row, settings=kept, numbers={**row.numbers, "num_draft_tokens": k})
    return row


def _with_regular(rows: Sequence[Stated]) -> list[Stated]:
    """The rows, with the times of the regular arm where it has one row of the same circumstances."""
    regular = defaultdict(list)
    for row in rows:
        if row.is_regular:
            regular[row.circumstances(OF_ARMS)].append(row)
    only = [row for arms in regular.values() for row in arms]
    whole = []
    for row in rows:
        ours = row.circumstances(OF_ARMS)
        arms = regular.get(ours, [])
        if not arms and len(only) == 1 and set(only[0].circumstances(OF_ARMS)) <= set(ours):
            # The only regular row leaves open what the others state.
            arms = only
        numbers = dict(row.numbers)
        if row.is_regular:
            numbers = {
                name: number for name, number in numbers.items() if name not in OF_SPECULATION
            }
        elif len(arms) == 1:
            known = {f"regular_{name}": number for name, number in arms[0].numbers.items()}
            numbers = {name: number for name, number in known.items() if name in NAMES} | numbers
        whole.append(replace(row, numbers=numbers))
    return whole
