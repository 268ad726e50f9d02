"""From a text, or typed figures, to rows with our names."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, MutableMapping, Sequence
from typing import NamedTuple

from harness.commands.audit.figures import (
    CLAIMS,
    MARKS,
    NAMES,
    SETTINGS,
    SPEEDS,
    Figure,
    Row,
    is_regular_arm,
    leading_numbers,
    speculative_rows,
)
from harness.commands.audit.headings import Cells, names_of_columns, plain
from harness.commands.audit.result_files import rows_of_results
from harness.config.errors import SettingError, nearest

# What to type in place of a text that is not read.
FORMS = (
    "reads a table (audit table.md; CSV, TSV, columns by spaces), a result file of vllm bench serve, SGLang's"
    " bench_serving, AIPerf or guidellm (audit with.json baseline=without.json), or bare figures"
    " (audit speedup=1.4 K=3 acceptance=0.7)"
)
# Headings below which `45 %` is 1.45×.
_IS_GAIN = re.compile(r"faster|gain|uplift|improve|[δΔ]|delta|\bvs\b|versus|over|relative")
# K inside the words of an arm: `MTP n=3`, `draft-max 8`, `MTP, block 4`, `5 draft tokens`.
_K_IN_WORDS = re.compile(
    r"[\s,(`]*(?:(?<![\w-])(?:(?:k|n|γ|gamma|mtp)\s*=|(?:n[-_ ]?max|spec-draft-n-max|draft[-_ ]?max|depth|block"
    r"|num_speculative_tokens)\s*[=:\s])\s*(\d{1,2})\b|\b(\d{1,2}) (?:draft|speculative) tokens)[)`]?",
    re.IGNORECASE,
)
# Columns and cells of a note.
_MOST_NAMED = 8
# No draft has as many accepted tokens per iteration on average.
_LONGEST = 20


class Reading(NamedTuple):
    """What a text states.

    Attributes:
        tables: the rows of each table that has a figure.
        read, unread: columns and what they were read as, and the others, a sentence for each table.
        notes: further sentences.
    """

    tables: list[list[Row]]
    read: list[str]
    unread: list[str]
    notes: list[str]


def stated_row(place: str, cells: Cells, everywhere: Row | None = None) -> Row:
    """A row by arguments, or by keys of a result file.

    Raises:
        SettingError: one is no such number.
    """
    odd: dict[str, list[str]] = defaultdict(list)
    row = _row(place, cells, everywhere or Row(place), (), odd)
    for name, (text, *_) in odd.items():
        raise SettingError(name, "must be a number, with its unit, or a range", text[:40])
    return row


def read_text(text: str, columns: Cells, everywhere: Row, title: str) -> Reading:
    """The tables of a text, or the runs of a result file.

    Args:
        columns: our names of what columns hold, by heading, for headings that are not known.
        everywhere: what holds for all rows.

    Raises:
        SettingError: there is none, or none has a figure.
    """
    results = rows_of_results(text)
    if results is not None:
        tool, records = results
        runs = [
            stated_row(f"run {place}", record, everywhere)
            for place, record in enumerate(records, start=1)
        ]
        figures = [f"{name} {text}" for record in records[:1] for name, text in record.items()]
        return Reading([runs], [f"read of {tool}: {' · '.join(figures)}"], [], [])
    marked = _markdown_tables(text)
    raw = marked or _table_by_lines(text)
    headings = [heading for rows in raw for heading in rows[0]]
    for heading, name in columns.items():
        if heading not in headings:
            rule = f"no table has this column{nearest(heading, headings)}; there are {', '.join(headings)}"
            raise SettingError("columns", rule, heading)
        if name not in NAMES:
            raise SettingError("columns", f"no such NAME{nearest(name, NAMES)} (--help)", name)
    reading = Reading([], [], [], [])
    for number, rows in enumerate(raw, start=1):
        where = f"table {number}, row" if len(raw) > 1 else "row"
        _read_table(rows, columns, everywhere, where, reading)
    if not reading.tables:
        raise SettingError(
            title, _why_nothing(text, raw, bool(marked) or title.endswith((".csv", ".tsv")))
        )
    return reading


def _why_nothing(text: str, raw: Sequence[Sequence[Cells]], is_table: bool) -> str:
    headings = [heading for rows in raw for heading in rows[0]]
    if re.search(r"<t[rdh]\b", text):
        return "has an HTML table, which is not read: save it as Markdown or CSV"
    if any("" in list(rows[0])[1:] for rows in raw):
        return "has columns without a heading: write two rows of headings as one"
    if is_table and headings:
        figures = "acceptance, length, speed-up or speed of both arms"
        return f"has no {figures} in columns that are known: {_listed(headings)} ({_to_name(headings[0])} reads one)"
    return f"has no table that is read; audit {FORMS}"


def _markdown_tables(text: str) -> list[list[dict[str, str]]]:
    tables = []
    for has_cells, lines in itertools.groupby(text.splitlines(), lambda line: "|" in line):
        if not has_cells:
            continue
        rows = [re.split(r"(?<!\\)\|", _bare(line)) for line in lines]
        if len(rows) > 2 and all(re.fullmatch(r"\s*:?-+:?\s*", cell) for cell in rows[1]):
            tables.append(_by_heading([rows[0], *rows[2:]]))
    return tables


def _bare(line: str) -> str:
    """A line of a table without its outer bars, tags, marks, and those of a quotation."""
    return (
        re.sub(r"^[\s>]+|</?[a-zA-Z][^>]*>|\*\*|`", "", line)
        .strip()
        .removeprefix("|")
        .removesuffix("|")
    )


def _table_by_lines(text: str) -> list[list[dict[str, str]]]:
    """A table whose columns are apart by a sign, or by spaces, in every line."""
    lines = [line for line in text.splitlines() if line.strip(" -=+\t|:")]
    # A comment above the heading.
    while len(lines) > 1 and lines[0][0] == "#" and lines[0].count(",") != lines[-1].count(","):
        del lines[0]
    by_spaces = [re.split(r"\s{2,}", line.strip()) for line in lines]
    for delimiter in "\t;,|":
        with contextlib.suppress(csv.Error):
            rows = [*csv.reader(lines, delimiter=delimiter)]
            if _are_even(rows, 2):
                return [_by_heading(rows)]
    # Two cells apart by spaces have the lines of a summary.
    return [_by_heading(by_spaces)] if _are_even(by_spaces, 3) else []


def _are_even(rows: Sequence[Sequence[str]], fewest: int) -> bool:
    widths = {len(row) for row in rows}
    return len(rows) > 1 and len(widths) == 1 and min(widths) >= fewest


def _by_heading(rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    headings: list[str] = []
    for heading in map(str.strip, rows[0]):
        is_new = not heading or heading not in headings
        headings.append(heading if is_new else f"{heading} ({len(headings) + 1})")
    padding = [""] * len(headings)
    return [dict(zip(headings, map(str.strip, [*row, *padding]), strict=False)) for row in rows[1:]]


def _read_table(
    rows: Sequence[Cells], columns: Cells, everywhere: Row, where: str, reading: Reading
) -> None:
    """Adds the rows of a table that has figures, and what was read of it."""
    names = names_of_columns(rows, columns)
    turned = _transposed(rows)
    if turned and _num_figures(names) < 2 <= _num_figures(names_of_columns(turned, columns)):
        # The arms are columns.
        rows, names = turned, names_of_columns(turned, columns)
    in_percent = set()
    for heading, name in list(names.items()):
        cells = [row[heading].strip(MARKS) for row in rows]
        share = _are_in_percent(plain(heading), name, cells)
        if share is None and heading not in columns:
            # It may be a rate in percent, a share, a length or a count.
            del names[heading]
        elif share is not False:
            in_percent.add(name)
    odd: dict[str, list[str]] = defaultdict(list)
    stated = []
    for place, row in enumerate(rows, start=1):
        cells_by_name = {name: row[heading] for heading, name in names.items()}
        stated.append(_row(f"{where} {place}", cells_by_name, everywhere, in_percent, odd))
    joined = speculative_rows(stated)
    if not any(_has_figures(row) for row in joined):
        return
    reading.tables.append(joined)
    meant = [f"{heading} → {name}" for heading, name in names.items() if name != "name"]
    if any(row.k_is_in_words for row in joined):
        meant.append("words of an arm → num_draft_tokens")
    reading.read.append(f"read: {' · '.join(meant)}")
    unread = [heading for heading in rows[0] if heading not in names and heading]
    if unread:
        reading.unread.append(f"not read: {_listed(unread)} ({_to_name(unread[0])} reads one)")
    for name, texts in odd.items():
        reading.notes.append(f"no {name} that is read: {_listed(texts)}")
    gains = [row.figures["speedup"].text for row in joined if "speedup" in row.figures]
    if any("slower" in gain or gain.startswith("-") for gain in gains):
        reading.notes.append("50 % slower is read as 0.50× the tokens/s; in time it would be 0.67×")


def _has_figures(row: Row) -> bool:
    """Whether it has a figure of speculation, or the speeds of both arms."""
    both = any({name, f"regular_{name}"} <= row.figures.keys() for name in SPEEDS)
    return both or not CLAIMS.keys().isdisjoint(row.figures)


def _num_figures(names: Cells) -> int:
    return len({*CLAIMS, *SPEEDS} & {*names.values()})


def _transposed(rows: Sequence[Cells]) -> list[dict[str, str]]:
    """A table whose first column has the headings, and whose further columns are the rows."""
    first, *arms = rows[0]
    return [{"columns": arm} | {row[first]: row[arm] for row in rows if row[first]} for arm in arms]


def _are_in_percent(words: str, name: str, cells: Sequence[str]) -> bool | None:
    """Whether numbers without a sign are in percent; None where that is not certain."""
    if name == "speedup":
        return bool(_IS_GAIN.search(words)) and "speed up" not in words and "speedup" not in words
    if name != "acceptance_rate" or any("%" in cell for cell in cells):
        return False
    if re.search(r"%|percent|pct", words):
        return True
    numbers = leading_numbers(cells)
    if max(numbers, default=0) <= 1:
        return False
    return True if min(numbers) > 1 and _LONGEST < max(numbers) <= 100 else None


def _listed(texts: Sequence[str]) -> str:
    more = f", {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(text[:40] for text in texts[:_MOST_NAMED]) + more


def _to_name(heading: str) -> str:
    """The argument that names a column."""
    return shlex.quote(f"columns={json.dumps({heading: 'NAME'}, ensure_ascii=False)}")


def _row(
    place: str,
    cells: Cells,
    everywhere: Row,
    in_percent: Collection[str],
    odd: MutableMapping[str, list[str]],
) -> Row:
    """A row by cells with our names; what is no such number is added to `odd`."""
    settings, figures = dict(everywhere.settings), dict(everywhere.figures)
    for name, text in cells.items():
        is_none = is_regular_arm(text) or text.strip(MARKS).lower() == "n/a"
        if name in SETTINGS:
            if text:
                settings[name] = "none" if name == "draft" and is_none else text
        elif name == "num_draft_tokens" and is_none:
            figures[name] = Figure(0, 0, text)
        else:
            try:
                figure = Figure.read(name, text, name in in_percent)
            except ValueError:
                odd[name].append(text)
                continue
            if figure is not None:
                figures[name] = figure
    return _with_k_in_words(Row(place, settings, figures))


def _with_k_in_words(row: Row) -> Row:
    """The row with the K that stands in the words of its arm, `MTP n=3`."""
    for name in ("draft", "name"):
        text = row.settings.get(name, "")
        match = _K_IN_WORDS.search(text)
        if match and "num_draft_tokens" not in row.figures and not row.is_regular:
            words = f"{text[: match.start()]}{text[match.end() :]}".strip()
            k = float(match[1] or match[2])
            settings = {**row.settings, name: words}
            figures = {**row.figures, "num_draft_tokens": Figure(k, k, f"{k:g}")}
            return Row(row.place, settings, figures, k_is_in_words=True)
    return row
