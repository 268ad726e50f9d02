"""Tables of published figures, in CSV, JSON, YAML and Markdown, whose columns have the names that others use."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

from harness.config.errors import SettingError, nearest
from harness.results.claims import CLAIMS, NAMES, OF_ARMS, OF_SPECULATION, SETTINGS, Printed, Stated

# What columns hold, by words in their headings in lower case; the first that is found counts.
_HEADINGS = (
    ("speedup", r"speed.?up|faster"),
    ("mean_num_draft_tokens", r"(proposed|drafted|draft tokens).*(per |/)\s?(iter|step|round)"),
    ("acceptance_rate", r"^accept(ed|ance)$|accept\w* (rate|ratio)|\balpha\b|α"),
    ("tokens_per_iteration", r"\bm?al\b|\btau\b|τ|accept\w* len|tok\w*.?(per |/)\s?(iter|step|round|forward)"),
    ("tokens_per_second", r"^(?!.*(total|input|prompt)).*(tok\w*.?(/|per )\s?s|\btps\b|throughput)"),
    ("ms_per_token", r"ms.?(/|per )\s?tok|tpot"),
    ("latency_s", r"^(\w+ )?latency( \(?s\)?)?$|^seconds$"),
    ("num_draft_tokens", r"^k$|γ|gamma|^(?!.*(accept|mean|avg|average|total)).*(draft|spec\w*|assistant) tokens"),
    ("num_prompts", r"(num|number of|#) ?(prompts|samples|questions)|^n$"),
    ("max_new_tokens", r"(max|new|output) .*(tokens|len)"),
    ("temperature", r"^t$|^temp"),
    ("batch_size", r"batch|concurrency|\bbs\b"),
    ("dtype", r"precision|quant"),
    ("prompts", r"^prompts$|data ?set|bench|task"),
    ("devices", r"device|gpu|hardware"),
    ("engine", r"engine|framework|backend"),
    ("draft", r"^(?!.*tokens).*(draft|method|head)"),
    ("model", r"model|target"),
)  # fmt: skip
_OF_REGULAR = re.compile(r"baseline|regular|vanilla|without|no spec|autoregressive")
Cells = Mapping[str, str]


def read_tables(path: Path, columns: Cells, everywhere: Cells) -> list[list[Stated]]:
    """The tables of a file; one without a claim has no rows.

    Args:
        columns: our names of what columns hold, by heading, for headings that are not known.
        everywhere: what holds for all rows, by our names.

    Raises:
        SettingError: no table has a claim, or a cell is no number; it names row and column.
    """
    try:
        tables = _tables(path)
    except OSError as error:
        raise SettingError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(str(path), "is no text: save the table as CSV or Markdown") from error
    except (ValueError, csv.Error, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise SettingError(str(path), f"is no {path.suffix or 'text'} file: {reason}") from error
    headings = list(dict.fromkeys(name for table in tables for row in table for name in row))
    for heading, name in columns.items():
        if heading not in headings:
            rule = f"no table has this column{nearest(heading, headings)}; there are {', '.join(headings)}"
            raise SettingError("columns", rule, heading)
        if name not in NAMES:
            raise SettingError("columns", f"no such NAME{nearest(name, NAMES)} (--help)", name)
    claims = []
    for number, table in enumerate(tables, start=1):
        names = _names(table, columns)
        if CLAIMS.keys().isdisjoint(names.values()):
            table = []
        where = f"table {number}, row" if len(tables) > 1 else "row"
        rows = [
            _stated(row, names, everywhere, f"{where} {place}")
            for place, row in enumerate(table, start=1)
        ]
        claims.append(_with_regular(rows))
    if not headings:
        raise SettingError(str(path), "has no table (of a text, Markdown tables are read)")
    if not any(claims):
        rule = f"has no column with a claim that is known: {', '.join(headings)} (columns=, see --help)"
        raise SettingError(str(path), rule)
    return claims


def _tables(path: Path) -> list[list[dict[str, str]]]:
    """Each table's rows, as cells by heading. Numbers stay text: 3.00 is not 3."""
    text = path.read_text(encoding="utf-8-sig")
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        first_line = text.partition("\n")[0]
        delimiter = max(",;\t|", key=first_line.count)
        rows = [*csv.DictReader(io.StringIO(text), delimiter=delimiter)]
        for place, row in enumerate(rows, start=1):
            if None in row or None in row.values():
                raise ValueError(f"row {place} has not as many cells as there are columns")
        return [rows]
    if suffix in (".json", ".yaml", ".yml"):
        content = yaml.load(text, yaml.BaseLoader)
        if isinstance(content, dict) and isinstance(content.get("rows"), list):
            # A `result.json` of ours.
            content = content["rows"]
        return [[*_records(content, "")]]
    tables: list[list[list[str]]] = []
    before = ""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif before in ("th_open", "td_open"):
            parts = [part for part in token.children or () if part.type != "html_inline"]
            tables[-1][-1].append("".join(part.content for part in parts))
        before = token.type
    return [[dict(zip(table[0], row, strict=False)) for row in table[1:]] for table in tables]


def _records(content: Any, name: str) -> Iterator[dict[str, str]]:
    """Records in a list or by name; lengths by K, `{model: {thinking: {1: 1.79}}}`, become a record for each K."""
    if isinstance(content, list):
        for record in content:
            yield from _records(record, name)
    elif isinstance(content, dict):
        flat = {}
        for key, value in content.items():
            if isinstance(value, str):
                flat[key] = value
            elif isinstance(value, dict) and {"estimate", "low", "high"} <= value.keys():
                flat[key] = f"{value['estimate']} ({value['low']} to {value['high']})"
        if flat and all(map(str.isdecimal, flat)):
            yield from ({"name": name, "K": k, "AL": length} for k, length in flat.items())
        elif flat:
            yield {"name": name, **flat}
        for key, inner in content.items():
            # What stands in a row of ours is about that row.
            if key not in flat and "run" not in flat:
                yield from _records(inner, f"{name} {key}".strip())


def _names(table: Sequence[Cells], columns: Cells) -> dict[str, str]:
    """Our name of what each column holds, by heading; the first column names the rows if nothing else is known."""
    headings = list(dict.fromkeys(heading for row in table for heading in row))
    names = {heading: columns.get(heading, heading) for heading in headings}
    names = {heading: name for heading, name in names.items() if name in NAMES}
    for heading in headings:
        # The columns of this project's own files, which have `run`, have these names exactly.
        if heading in names or "run" in headings:
            continue
        words = heading.lower().replace("_", " ").strip()
        meant = next((name for name, pattern in _HEADINGS if re.search(pattern, words)), None)
        if meant is not None and _OF_REGULAR.search(words):
            meant = f"regular_{meant}"
        if meant in NAMES and meant not in names.values():
            names[heading] = meant
    if headings and "name" not in names.values():
        names.setdefault(headings[0], "name")
    return names


def _stated(row: Cells, names: Cells, everywhere: Cells, place: str) -> Stated:
    """A row of a table as claims.

    Raises:
        SettingError: a cell is no number.
    """
    settings: dict[str, str] = {}
    numbers: dict[str, Printed] = {}
    cells = [(name, name, text) for name, text in everywhere.items()]
    for heading, name in names.items():
        cells.append((f"{place}, column {heading}", name, row.get(heading, "")))
    for where, name, cell in cells:
        text = cell.strip()
        if name in SETTINGS:
            if text:
                settings[name] = text
            continue
        try:
            number = Printed.read(name, text)
        except ValueError as error:
            raise SettingError(
                where, f"must be a number, with a unit or an interval: {text[:40]}"
            ) from error
        if number is not None:
            numbers[name] = number
    return Stated(place, settings, numbers)


def _with_regular(rows: Sequence[Stated]) -> list[Stated]:
    """The rows, with the times of the regular arm where it has one row of the same circumstances."""
    whole = []
    for row in rows:
        ours = row.circumstances(OF_ARMS)
        arms = [one for one in rows if one.is_regular and one.circumstances(OF_ARMS) == ours]
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
