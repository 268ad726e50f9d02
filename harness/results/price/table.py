"""Cost and acceptance tables supplied by the user, as CSV: `width,rows,ms`, or the figures of a published sweep.

A row is an iteration at a width (or K) and a number of rows in flight: its `ms`, or the ms per token after the first
and the tokens per iteration, whose product that is. A row with width 1, or without K, is a regular step. What else a
row says, such as the data set, selects rows: `FILE@HumanEval`. Lines that begin with `#` say where a table is from.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from harness.config.errors import SettingError
from harness.config.settings import LARGEST_K
from harness.results.price.value import IterationCost, why_queued
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval

# Lengths that differ by less between loads are the same but for noise.
_SAME = 0.05
# What a number may be: of times and speeds, and by column.
_TIMES = (1e-6, 1e9)
_BOUNDS = {"k": (0, LARGEST_K), "width": (1, LARGEST_K + 1), "rows": (1, 1e6)}
# Names of columns, the first of which is ours. What has none of them is text, by which rows are selected.
_COLUMNS: Mapping[str, Sequence[str]] = {
    "width": ("width", "tokens", "verified"),
    "k": ("k", "num_draft_tokens", "draft_tokens", "num_speculative_tokens"),
    "rows": ("rows", "in_flight", "num_in_flight", "batch_size", "concurrency", "batch"),
    "ms": ("ms", "iteration_ms", "milliseconds"),
    "low": ("ms_low", "low"),
    "high": ("ms_high", "high"),
    "ms_per_token": ("ms_per_token", "ms_per_token_after_the_first", "tpot_ms", "itl_ms", "tpot"),
    "tokens": ("tokens_per_iteration", "acceptance_length", "mean_acceptance_length"),
    "speed": ("tokens_per_second_per_user", "tokens_per_second"),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """The contents of a table, by the name of the draft; `""` where it names none.

    Attributes:
        costs: of an iteration.
        yields: tokens per iteration by K, over all loads: what is accepted depends on none.
        lengths: mean tokens of the answers that yields are of, by draft.
        rates: of acceptance by position, the last of which holds for further ones, where yields follow from these.
        measured: speed-ups of decoding by draft, K and rows in flight.
        origin: columns of the runs that it was made of: model, engine and devices.
        notes: why runs have no price, and what figures are means of.
    """

    costs: Mapping[str, IterationCost] = field(default_factory=dict)
    yields: Mapping[str, Mapping[int, Interval]] = field(default_factory=dict)
    lengths: Mapping[str, float] = field(default_factory=dict)
    rates: Sequence[float] = ()
    measured: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def for_draft(self, setting: str, draft: str, path: str) -> Table:
        """The same with the costs and yields of one draft alone.

        Raises:
            SettingError: it has none of that name.
        """
        costs = {name: cost for name, cost in self.costs.items() if name == draft}
        yields = {
            name: yields_of_draft for name, yields_of_draft in self.yields.items() if name == draft
        }
        if not costs and not yields:
            names = ", ".join([*self.costs, *self.yields])
            raise SettingError(setting, f"has no draft {draft}, but {names}", path)
        return replace(self, costs=costs, yields=yields)


@dataclass(frozen=True)
class _Row:
    """A row: `ms` is that of an iteration or, of width 1, of a regular step; `waits` is the whole time of an answer
    over that of decoding it, where both are known.
    """

    draft: str
    width: int
    rows: int
    ms: Interval
    tokens: float | None
    waits: float | None


def read_table(setting: str, path: str) -> Table:
    """Read `FILE`, or of its rows those with each of the words in `FILE@WORD@WORD`.

    Raises:
        SettingError: there is no such file, or a row of it is not understood.
    """
    name, *words = [path] if Path(path).is_file() else path.split("@")
    try:
        lines = Path(name).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(setting, "cannot be read as text", path) from error
    written = (line for line in lines if line.strip() and not line.startswith("#"))
    table = csv.DictReader(written, skipinitialspace=True, restval="")
    names = {column.strip().lower(): column for column in table.fieldnames or []}
    columns = {
        ours: next((names[alias] for alias in aliases if alias in names), None)
        for ours, aliases in _COLUMNS.items()
    }
    if columns["k"] is None and columns["width"] is None:
        rule = "must have a column k or width (and rows, ms), or be a run of harness"
        raise SettingError(setting, rule, path)
    if columns["k"] and columns["width"]:
        rule = f"has two columns for what an iteration verifies, {columns['k']} and {columns['width']}: leave one out"
        raise SettingError(setting, rule, path)
    drafts = names.get("draft")
    texts = [column for column in names.values() if column not in (*columns.values(), drafts)]
    rows = list(table)
    for word in words:
        marked = {column for row in rows for column, cell in row.items() if cell == word}
        if not marked:
            raise SettingError(setting, f"has no row with {word}", path)
        # A regular step is of every draft, and of all data where it names none.
        is_of_all = drafts in marked
        rows = [
            row
            for row in rows
            if word in row.values()
            or (_is_regular(row, columns) and (is_of_all or not any(map(row.get, marked))))
        ]
    for column in texts:
        values = [value for value in dict.fromkeys(row[column] for row in rows) if value]
        if len(values) > 1 and not all(map(_is_number, values)):
            rule = f"has several {column}: {', '.join(values[:4])}; name one: {name}@{values[0]}"
            raise SettingError(setting, rule, path)
    read = []
    for number, row in enumerate(rows, start=1):
        try:
            read.append(_row(row, columns, row[drafts] if drafts else ""))
        except (ValueError, TypeError) as error:
            raise SettingError(setting, f"row {number} is not understood: {error}", path) from error
    return _table(read, path)


def _is_regular(row: Mapping[str, str], columns: Mapping[str, str | None]) -> bool:
    k, width = columns["k"], columns["width"]
    return row[k] in ("", "0", "0.0") if k else row[width or ""] in ("1", "1.0")


def _row(row: Mapping[str, str], columns: Mapping[str, str | None], draft: str) -> _Row:
    def number(name: str) -> float | None:
        column = columns[name]
        text = (row[column] or "").strip() if column else ""
        if not text:
            return None
        value = float(text)
        least, most = _BOUNDS.get(name, _TIMES)
        if not least <= value <= most:
            raise ValueError(f"{column} is {text}")
        return value

    width = number("width")
    width = 1 + (number("k") or 0) if width is None else width
    rows = number("rows") or 1
    if (width, rows) != (int(width), int(rows)):
        raise ValueError(f"a width of {width:g} with {rows:g} in flight")
    ms, low, high = (number(name) for name in ("ms", "low", "high"))
    ms_per_token, tokens, speed = (number(name) for name in ("ms_per_token", "tokens", "speed"))
    if tokens and not 1 <= tokens <= width:
        raise ValueError(f"{tokens:g} tokens per iteration of {width:g}")
    if ms is None and ms_per_token is not None:
        ms = ms_per_token * (tokens or (1 if width == 1 else math.nan))
    time = Interval() if not ms else Interval(ms)
    if ms and (low or high):
        # One alone is no interval.
        if low is None or high is None or not low <= ms <= high:
            raise ValueError(f"{ms:g} ms is not between {low} and {high}")
        time = Interval(ms, low, high)
    waits = 1000 / speed / ms_per_token if speed and ms_per_token else None
    is_regular = width == 1
    return _Row("" if is_regular else draft, int(width), int(rows), time, tokens, waits)


def _table(rows: Sequence[_Row], path: str) -> Table:
    regular = [row for row in rows if row.width == 1]
    costs = {}
    yields: dict[str, dict[int, Interval]] = {}
    measured = {}
    notes: list[str] = []
    for draft, members in grouped(
        [row for row in rows if row.width > 1], attrgetter("draft")
    ).items():
        timed = [row for row in (*regular, *members) if row.ms.is_known]
        if any(row.width > 1 for row in timed):
            refused = _refused(regular, members)
            points = [(row.width, row.rows, row.ms) for row in timed]
            costs[draft] = IterationCost.from_points(points, path, refused)
        for width, same in grouped(
            [row for row in members if row.tokens], attrgetter("width")
        ).items():
            lengths = [row.tokens or 0.0 for row in same]
            yields.setdefault(draft, {})[width - 1] = Interval(fmean(lengths))
            spread = max(lengths) / min(lengths) - 1
            if spread > _SAME:
                several = f"{min(lengths):g} to {max(lengths):g} tokens per iteration"
                notes.append(f"{draft or path} yields {several} at K={width - 1}: the mean counts")
        if draft in costs:
            for row in members:
                k = row.width - 1
                if row.tokens and k in costs[draft].ks(row.rows):
                    speedup = row.tokens / costs[draft].point(k, row.rows).steps.estimate
                    measured[draft, k, row.rows] = speedup
    return Table(costs, yields, measured=measured, notes=notes)


def _refused(regular: Sequence[_Row], members: Sequence[_Row]) -> dict[int, str]:
    """Loads at which answers waited much longer than regular ones."""
    alone = {row.rows: row.waits for row in regular}
    refused = {}
    for row in members:
        beside = alone.get(row.rows)
        reason = why_queued(row.rows, row.waits / beside) if row.waits and beside else None
        if reason:
            refused[row.rows] = reason
    return refused


def _is_number(text: str) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return False
    return True
