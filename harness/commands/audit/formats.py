"""Tables as they are written, in CSV, JSON, YAML, Markdown and pasted text: cells by heading, whatever they mean."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from markdown_it import MarkdownIt

from harness.commands.audit.passages import rows_of_log, rows_of_sentences


class Raw(NamedTuple):
    """A table as it is written: cells by heading, and what its rows are called."""

    rows: list[dict[str, str]]
    row: str = "row"


def raw_tables(text: str, suffix: str) -> list[Raw]:
    """Each table's rows, as cells by heading. Numbers stay text: 3.00 is not 3."""
    if suffix in (".csv", ".tsv"):
        return [Raw(_rows_of_csv(text))]
    if suffix == ".jsonl":
        records = [
            json.loads(line, parse_float=str, parse_int=str)
            for line in text.splitlines()
            if line.strip()
        ]
        return [Raw([*_records(records, "")])]
    if suffix in (".json", ".yaml", ".yml"):
        content = yaml.load(text, _WithoutAliases)
        if isinstance(content, dict) and isinstance(content.get("rows"), list):
            # A `result.json` of ours.
            content = content["rows"]
        return [Raw([*_records(content, "")])]
    tables: list[list[list[str]]] = []
    before = ""
    rest = text.splitlines()
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            tables.append([])
            if token.map is not None:
                first, last = token.map
                rest[first:last] = [""] * (last - first)
        elif token.type == "tr_open":
            tables[-1].append([])
        elif before in ("th_open", "td_open"):
            parts = [part for part in token.children or () if part.type != "html_inline"]
            tables[-1][-1].append("".join(part.content for part in parts))
        before = token.type
    raw = [Raw([dict(zip(table[0], row, strict=False)) for row in table[1:]]) for table in tables]
    if not suffix and not any(table.rows for table in raw):
        # What is pasted may be a table of a spreadsheet.
        first_line = text.strip().partition("\n")[0]
        if "\n" in text.strip() and any(first_line.count(sign) for sign in "\t;,"):
            with_columns = first_line.count("\t") or re.fullmatch(r"[^.!?]*", first_line)
            try:
                pasted = _rows_of_csv(text.strip()) if with_columns else []
            except ValueError:
                pasted = []
            if pasted and len(pasted[0]) > 1:
                return [Raw(pasted)]
    passages = "\n".join(rest)
    raw += [Raw(rows, "log") for rows in [rows_of_log(passages)] if rows]
    raw += [Raw(rows, "sentence") for rows in [rows_of_sentences(passages)] if rows]
    return [table for table in raw if table.rows]


class _WithoutAliases(yaml.BaseLoader):
    """Refuses `*name`, of which ten lines may stand for a billion cells."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases (*name) are not read: write out what they stand for")
        return super().compose_node(parent, index)


def _rows_of_csv(text: str) -> list[dict[str, str]]:
    lines = text.splitlines()
    # A comment above the heading has no delimiters.
    while len(lines) > 1 and lines[0].startswith("#") and not re.search(r"[,;\t|]", lines[0]):
        del lines[0]
    if not lines:
        return []
    delimiter = max(",;\t|", key=lines[0].count)
    rows = [*csv.DictReader(io.StringIO("\n".join(lines)), delimiter=delimiter)]
    for place, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            rule = f"row {place} has not as many cells as there are columns"
            raise ValueError(f"{rule} in the heading, its first line: {lines[0][:40]}")
    return rows


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


def why_no_table(text: str, suffix: str) -> str:
    """Why a text has no table, for an error."""
    if re.search(r"<t[rdh]\b", text):
        return "has an HTML table, which is not read: save it as Markdown or CSV"
    has_heading = suffix in (".csv", ".tsv") and text.strip()
    if has_heading or re.search(r"^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$", text, re.MULTILINE):
        return "has a table with a heading and no rows"
    return "has no table, nor a sentence or log with figures (of a text, Markdown tables are read)"
