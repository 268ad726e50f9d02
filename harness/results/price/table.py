"""Cost and acceptance tables supplied by the user: `width,rows,ms`, or the figures of a published sweep.

A row is an iteration at a width (or K) and a number of rows in flight: its `ms`, or the ms per token after the first
and the tokens per iteration, whose product that is. A row with width 1, or without K, is a regular step. What else a
row says, such as the data set, selects rows: `FILE@HumanEval`. Headings and forms are those that `audit` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from harness.config.errors import SettingError
from harness.results.price.value import IterationCost, why_queued
from harness.results.printed.figures import is_stated
from harness.results.printed.headings import ARM, UNUSED
from harness.results.printed.reader import PrintedRow, read_tables
from harness.results.runs import grouped
from harness.results.statistics.interval import NAN, Interval

# Slower rows are left out, with a note.
_LEAST_SPEEDUP = 0.02
_NUMBERS = (
    "width",
    "ms",
    "ms_low",
    "ms_high",
    "num_draft_tokens",
    "batch_size",
    "tokens_per_iteration",
    "ms_per_token",
    "tokens_per_second",
    "user_tokens_per_second",
)


@dataclass(frozen=True)
class PriceTable:
    """The contents of a table, by the name of the draft; `""` where it names none.

    Attributes:
        costs: of an iteration.
        yields: tokens per iteration by K, over all loads.
        yields_at: the same at one load, by draft and load.
        lengths: mean tokens of the answers that yields are of, by draft.
        rates: of acceptance by position, where yields follow from these; the last holds for further positions.
        measured: speed-ups of decoding by draft, K and rows in flight.
        origin: columns of the runs that it was made of: model, engine and devices, and the command that was typed.
        notes: rows that were left out, and what figures are means of.
    """

    costs: Mapping[str, IterationCost] = field(default_factory=dict)
    yields: Mapping[str, Mapping[int, Interval]] = field(default_factory=dict)
    yields_at: Mapping[tuple[str, int], Mapping[int, Interval]] = field(default_factory=dict)
    lengths: Mapping[str, float] = field(default_factory=dict)
    rates: Sequence[float] = ()
    measured: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def for_draft(self, setting: str, draft: str, path: str) -> PriceTable:
        """The same with the costs and yields of one draft alone.

        Raises:
            SettingError: it has none of that name.
        """
        if draft not in {*self.costs, *self.yields}:
            names = ", ".join(dict.fromkeys([*self.costs, *self.yields]))
            raise SettingError(setting, f"has no draft {draft}, but {names}", path)
        costs = {draft: self.costs[draft]} if draft in self.costs else {}
        yields = {draft: self.yields[draft]} if draft in self.yields else {}
        return replace(self, costs=costs, yields=yields)


@dataclass(frozen=True)
class _Row:
    """A row.

    Attributes:
        load: requests in flight.
        ms: of an iteration or, of width 1, of a regular step.
        tokens: per iteration.
        waits: the time of a whole answer over that of decoding it.
    """

    draft: str
    width: int
    load: int
    ms: Interval
    tokens: float | None
    waits: float | None


def read_table(setting: str, path: str) -> PriceTable:
    """Read `FILE`, or of its rows those with each of the words in `FILE@WORD@WORD`.

    Raises:
        SettingError: there is no such file, or a row of it is not understood.
    """
    name, *words = [path] if Path(path).is_file() else path.split("@")
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(setting, "cannot be read as text", path) from error
    tables = read_tables(setting, text, (*_NUMBERS, ARM, UNUSED))
    for table in tables:
        names = {column.name for column in table.columns.values()}
        if not {"num_draft_tokens", "width"}.isdisjoint(names):
            break
    else:
        rule = "must have a column k or width (and rows, ms), or be a run of harness"
        raise SettingError(setting, rule, path)
    rows = [*table.rows]
    for word in words:
        headings = {heading for row in rows for heading, cell in row.cells.items() if cell == word}
        if not headings:
            raise SettingError(setting, f"has no row with {word}", path)
        names_draft = any(table.columns[heading].name == ARM for heading in headings)
        chosen = []
        for row in rows:
            is_named = any(is_stated(row.cells.get(heading, "")) for heading in headings)
            # A regular step is of every draft, and of all data where it names none.
            if word in row.cells.values() or (_width(row) == 1 and (names_draft or not is_named)):
                chosen.append(row)
        rows = chosen
    for heading in rows[0].conditions:
        values = [*filter(is_stated, dict.fromkeys(row.cells[heading] for row in rows))]
        if len(values) > 1:
            one = f"name one, {name}@{values[0]}, or leave that column out"
            rule = f"has several {heading}: {', '.join(values[:4])}; {one}"
            raise SettingError(setting, rule, path)
    return _table([_row(setting, path, row) for row in rows], path)


def _width(row: PrintedRow) -> int:
    k, width = (row.figures.get(name) for name in ("num_draft_tokens", "width"))
    return int(width.low if width else 1 + (k.low if k else 0))


def _row(setting: str, path: str, row: PrintedRow) -> _Row:
    values = {name: figure.middle for name, figure in row.figures.items()}
    width, tokens, ms = _width(row), values.get("tokens_per_iteration"), values.get("ms")
    ms_per_token = values.get("ms_per_token")
    if ms is None and ms_per_token and (tokens or width == 1):
        ms = ms_per_token * (tokens or 1)
    bounds = [values[name] for name in ("ms_low", "ms_high") if name in values]
    problem = ""
    # One bound alone is no interval.
    if ms and bounds and not (len(bounds) == 2 and bounds[0] <= ms <= bounds[1]):
        problem = f"{ms:g} ms is not between {' and '.join(map(str, bounds))}"
    if tokens and not 1 <= tokens <= width:
        problem = f"{tokens:g} tokens per iteration of {width}"
    if problem:
        raise SettingError(setting, f"{row.place} is not understood: {problem}", path)
    time = Interval()
    if ms:
        low, high = bounds or (NAN, NAN)
        time = Interval(ms, low, high)
    speed = values.get("user_tokens_per_second", values.get("tokens_per_second"))
    waits = None
    if speed and ms_per_token:
        ms_per_token_of_answer = 1000 / speed
        waits = ms_per_token_of_answer / ms_per_token
    draft = ", ".join(row.arms) if width > 1 else ""
    return _Row(draft, width, int(values.get("batch_size", 1)), time, tokens, waits)


def _table(rows: Sequence[_Row], path: str) -> PriceTable:
    costs: dict[str, IterationCost] = {}
    yields: dict[str, dict[int, Interval]] = {}
    yields_at: dict[tuple[str, int], dict[int, Interval]] = {}
    measured = {}
    notes = []
    regular = [row for row in rows if row.width == 1]
    waits = {row.load: row.waits for row in regular if row.waits}
    step_ms = {row.load: row.ms.estimate for row in regular if row.ms.is_known}
    drafting: dict[str, list[_Row]] = {}
    for row in rows:
        if row.width == 1:
            continue
        speedup = step_ms.get(row.load, NAN) * (row.tokens or NAN) / row.ms.estimate
        if speedup < _LEAST_SPEEDUP:
            place = f"{row.draft or path} at K={row.width - 1} with {row.load} in flight"
            notes.append(f"{place} is {speedup:.1g} times as fast as without: the row is left out")
        else:
            drafting.setdefault(row.draft, []).append(row)
    for draft, members in drafting.items():
        if any(row.ms.is_known for row in members):
            points = [
                (row.width, row.load, row.ms) for row in (*regular, *members) if row.ms.is_known
            ]
            # Loads at which answers waited much longer than regular ones.
            refused = {}
            for row in members:
                if row.waits and row.load in waits:
                    reason = why_queued(row.load, row.waits / waits[row.load])
                    if reason:
                        refused[row.load] = reason
            costs[draft] = IterationCost.from_points(points, path, refused)
        for k, rows_of_k in grouped(members, lambda row: row.width - 1).items():
            tokens_of_k = [row.tokens for row in rows_of_k if row.tokens]
            if not tokens_of_k:
                continue
            yields.setdefault(draft, {})[k] = Interval(fmean(tokens_of_k))
            for load, rows_at_load in grouped(rows_of_k, attrgetter("load")).items():
                tokens = [row.tokens for row in rows_at_load if row.tokens]
                if not tokens:
                    continue
                yields_at.setdefault((draft, load), {})[k] = Interval(fmean(tokens))
                if draft not in costs or k not in costs[draft].ks(load):
                    continue
                steps = costs[draft].point(k, load).steps.estimate
                measured[draft, k, load] = fmean(tokens) / steps
    return PriceTable(costs, yields, yields_at, measured=measured, notes=notes)
