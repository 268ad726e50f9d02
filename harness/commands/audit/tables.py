"""Tables of published figures, in CSV, JSON, YAML, Markdown and pasted text, whose columns have the names that others
use.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from markdown_it import MarkdownIt

from harness.commands.audit.passages import rows_of_log, rows_of_sentences
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

# What columns hold, by words in their headings in lower case; the first that is found counts.
_SPEED = r"(tok\w*.?(/|per )\s?s|\btps\b|\bt[ok]{0,2}/s|throughput"
_ARM = r"baseline|regular|vanilla|without|no.spec\w*|no.mtp|plain|classic|autoregressive|ar|off"
_ITERATION = r"(iter|step|round|forward|verif|cycle)"
_HEADINGS = (
    ("speedup", r"speed.?up|faster|\bgains?\b|uplift|^[δΔ]|\bdelta\b"),
    ("speedup", rf"\b(vs\.?|versus|over|relative to) (the )?({_ARM})"),
    ("speedup", r"^speed$|^ratio$"),
    ("mean_num_draft_tokens", rf"(proposed|drafted|draft tokens).*(per |/)\s?{_ITERATION}"),
    ("num_accepted", r"^(n|num|#)? ?accept(ed)?( draft)?( tokens)?$"),
    ("num_drafted", r"^(n|num|#)? ?(drafted|draft|proposed|generated)( tokens)?$"),
    ("conditional_acceptance_rate", r"\balpha\b|α|conditional accept"),
    ("acceptance_rate", r"^((draft|mtp|avg\.?|mean|token) )?accept(ed|ance)?( \(.*\))?$"),
    ("acceptance_rate", r"accept\w*\.? ?(rate|ratio|%|pct|percent)"),
    ("acceptance_rate", r"(rate|%) accepted|^acc\.? (rate|%)"),
    ("tokens_per_iteration", r"(?<!et )\bm?al\b|\btau\b|τ|accept\w*\.? len|\ba\.?len\b|^mean len|block efficiency"),
    ("tokens_per_iteration", rf"(mean|avg\.?|average) accepted (tokens|len)|tok\w*.?(per |/)\s?{_ITERATION}"),
    ("user_tokens_per_second", rf"^(?!.*(total|input|prompt|req/)).*{_SPEED}|speed).*(per.|/ ?)(user|request|stream)"),
    ("user_tokens_per_second", rf"per.(user|stream|request).*{_SPEED}|speed)"),
    ("tokens_per_second", rf"^(?!.*(total|input|prompt|prefill|\bpp\b|req)).*{_SPEED})"),
    ("ms_per_token", r"ms.?(/|per )\s?tok|tpot|\bitl\b"),
    ("latency_s", r"^(\w+ )?latency( \(?s\)?)?$|^(\w+ )?seconds$|^(wall|time)( time)? ?\(s\)$"),
    ("num_draft_tokens", r"^k$|^n.?draft$|γ|gamma"),
    ("num_draft_tokens", r"\bn.?max|draft.?max|^block( size)?$|^depth$|draft (len\w*|size|depth)"),
    ("num_draft_tokens", r"^(?!.*(accept|mean|avg|average|total)).*(draft|spec\w*|assistant) tokens"),
    ("num_prompts", r"(num|number of|#) ?(prompts|samples|questions)|^n$"),
    ("max_new_tokens", r"(max|new|output) .*(tokens|len)|^n.predict$"),
    ("temperature", r"^t$|^temp"),
    ("batch_size", r"batch|concurren|\bbs\b|in.?flight|^parallel|^streams?$|^users?$|^clients?$"),
    ("tensor_parallel", r"^tp( size)?$|tensor.parallel"),
    ("num_devices", r"^(#|n|num|number of) ?(gpus?|devices|cards)$|^gpus$|^devices$"),
    ("dtype", r"precision|quant|^dtype$"),
    ("prompts", r"^prompts?( type)?$|data ?set|bench|task|^content$|workload|category|domain"),
    ("devices", r"device|gpu|hardware"),
    ("engine", r"engine|framework|backend"),
    ("draft", r"^(?!.*tokens).*(draft|method|head)|^(mode|arm|config\w*|setup|variant|condition|spec\w*)$"),
    ("model", r"model|target"),
)  # fmt: skip
# Headings below which `45 %` is 1.45×.
_IS_GAIN = re.compile(r"faster|gain|uplift|improve|[δΔ]|delta|\bvs\b|versus|over|relative")
_OF_REGULAR = re.compile(rf"\b({_ARM})\b")
# K inside the words of an arm: `MTP n=3`, `draft-max 8`, `MTP, block 4`, `5 draft tokens`.
_K_IN_WORDS = re.compile(
    r"[\s,(]*(?:\b(?:k|n|γ|gamma|n[-_ ]?max|spec-draft-n-max|draft[-_ ]?max|depth|block|num_speculative_tokens)"
    r"\s*[=:\s]\s*(\d{1,2})\b|\b(\d{1,2}) (?:draft|speculative) tokens)\)?",
    re.IGNORECASE,
)
# Columns and cells of a note.
_MOST_NAMED = 8
# More are counts of draft tokens.
_LARGEST_K = 64
# No draft has as many accepted tokens per iteration on average.
_LONGEST = 20
Cells = Mapping[str, str]


class Raw(NamedTuple):
    """A table as it is written: cells by heading, and what its rows are called."""

    rows: list[dict[str, str]]
    row: str = "row"


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
        tables = _tables(text, suffix)
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
        names = _names(rows, columns)
        if rows and _num_claims(names) < 2:
            # The arms may be columns.
            turned = _transposed(rows)
            names_of_turned = _names(turned, columns)
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
        raise SettingError(title, _why_no_table(text, suffix))
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


def _why_no_table(text: str, suffix: str) -> str:
    if re.search(r"<t[rdh]\b", text):
        return "has an HTML table, which is not read: save it as Markdown or CSV"
    has_heading = suffix in (".csv", ".tsv") and text.strip()
    if has_heading or re.search(r"^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$", text, re.MULTILINE):
        return "has a table with a heading and no rows"
    return "has no table, nor a sentence or log with figures (of a text, Markdown tables are read)"


def _tables(text: str, suffix: str) -> list[Raw]:
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


def _names(table: Sequence[Cells], columns: Cells) -> dict[str, str]:
    """Our name of what each column holds, by heading; the first column names the rows if nothing else is known."""
    headings = list(dict.fromkeys(heading for row in table for heading in row))
    names = {heading: columns.get(heading, heading) for heading in headings}
    names = {heading: name for heading, name in names.items() if name in NAMES}
    # The columns of this project's own files, which have `run`, have these names exactly.
    unknown = [one for one in headings if one not in names] if "run" not in headings else []
    cells = {one: [row.get(one, "").strip("*~≈ ") for row in table] for one in unknown}
    # K drafts, each of L tokens.
    plain = {_plain(heading): heading for heading in unknown}
    if "k" in plain and (
        length := next((plain[one] for one in ("l", "γ", "gamma") if one in plain), None)
    ):
        names |= {plain["k"]: "num_drafts", length: "num_draft_tokens"}
    for heading in unknown:
        meant = meaning(heading, cells[heading])
        if meant is not None and heading not in names and meant not in names.values():
            names[heading] = meant
    for heading in unknown:
        # A column in which some rows are called regular is that of the arms.
        regular = [Stated("", {"draft": cell}).is_regular for cell in cells[heading] if cell]
        if (
            heading not in names
            and "draft" not in names.values()
            and any(regular)
            and not all(regular)
        ):
            names[heading] = "draft"
    if headings and "name" not in names.values():
        names.setdefault(headings[0], "name")
    return names


def _plain(heading: str) -> str:
    return " ".join(heading.lower().replace("_", " ").strip("*` ").split())


def meaning(heading: str, cells: Sequence[str]) -> str | None:
    """Our name of what a column holds, by its heading and by what its cells can be."""
    words = _plain(heading)
    stated = [cell for cell in cells if Printed.is_stated(cell)]
    counts = [int(cell.replace(",", "")) for cell in stated if re.fullmatch(r"\d[\d,]*", cell)]
    are_counts = bool(counts) and len(counts) == len(stated)
    for name, pattern in _HEADINGS:
        if not re.search(pattern, words):
            continue
        if name == "speedup":
            has_signs = all(re.search(r"[×xX%]", cell) for cell in stated)
            if re.search(r"speed.?up", words) or (has_signs and stated):
                # `Speedup over vanilla` is not that of vanilla.
                return name
            continue
        if name in ("num_accepted", "num_drafted"):
            # `accepted` may be a rate, and `draft` a name or K.
            least = 1 if name == "num_accepted" else _LARGEST_K
            if not are_counts or max(counts) <= least:
                continue
        if (
            name == "acceptance_rate"
            and words in ("accepted", "accept")
            and are_counts
            and max(counts) > 1
        ):
            return None
        if name == "num_devices" and not are_counts:
            continue
        if name == "num_draft_tokens" and are_counts and max(counts) > _LARGEST_K:
            name = "num_drafted"
        if _OF_REGULAR.search(words) and f"regular_{name}" in NAMES:
            name = f"regular_{name}"
        elif _OF_REGULAR.search(words) and name in CLAIMS:
            return None
        return name
    # Units of the cells, where the heading has none.
    is_speed = stated and all(re.search(r"\b(tok\w*|tk|t)/s", cell) for cell in stated)
    return (
        "tokens_per_second"
        if is_speed and not re.search(r"prompt|prefill|\bpp\b|total", words)
        else None
    )


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
    words = _plain(heading)
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
