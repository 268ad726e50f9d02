"""Rows of CSV files as dataclasses. The fields of a dataclass describe the columns of its file:

    batch_size: int | None = setting("rows decoded at once", "batch_size")
    ms_per_token: float | None = figure("time per token of a row", "ms")
    speedup: Interval | None = pooled("mean", "regular time / speculative time")
    devices: str | None = circumstance("names of the devices that computed")

`setting`, `figure`, `pooled` and `circumstance` make the fields, with descriptions of their columns.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, TypeAdapter

from harness.results.statistics.interval import Coverage, Interval

# These columns come first in a file, if it has them.
_FIRST = (
    "run job model draft arm check verdict batch_size num_draft_tokens temperature seed".split()
)

# Larger whole numbers are not read: a damaged file may contain one of any length.
_MOST = 2**64
# Below this, every whole number can be represented as a float.
_MOST_AS_FLOAT = 2**53
# Truth values as `csv` and spreadsheets write them.
_IN_JSON = {"True": "true", "False": "false", "TRUE": "true", "FALSE": "false"}


# The rules by which the values of several runs are pooled into one value. Lists are pooled position by position.
#
#     mean, sum, largest, smallest
#     quadratic mean     for standard deviations
#     all, any           for truth values: true if all runs' values are true, or if any is
#     same               the common value of all runs; None if they differ
#     none               no value
#
# (The type is divided only because of its length.)
Pooling = (
    Literal["mean", "quadratic mean", "sum", "largest", "smallest"]
    | Literal["all", "any", "same", "none"]
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnDescription:
    """A column of a CSV file, as the field of a row describes it.

    The field `num_draft_tokens: int | Literal["auto"] | None` has the type and the hint int, the words ("auto",), and
    is optional. The field `acceptance_by_position: list[float | None] | None` has the type list and the hint
    `list[float | None]`.

    The field `speedup: Interval | None` is described as four columns: `speedup`, `speedup_low`, `speedup_high` and
    `speedup_covers`. The text describes the estimate.

    Attributes:
        field: name of the row's field.
        part: for a column of an interval: `estimate`, `low`, `high` or `covers`; empty for any other field.
        kind: `setting` for settings of the user, `figure` for values that were measured or computed, `circumstance` for
            the place, time and tools of the measurement.
        text: one line for `harness help columns`.
        unit: unit of the values; empty if they have none.
        pools: the rule by which figures of several runs are pooled (`pooling.py`); None if they never are. Of an
            interval, only the estimate is pooled: means of bounds would not be an interval over several runs.
        per: for a rate, the field that is its denominator. Weighted by this field, the mean over runs is the ratio of
            the runs' totals.
        path: the name of the setting in the command's settings, such as `decoding.top_k`; empty if the command fills in
            the column.
        phrase: the words with which a page shows a value, such as `{} new tokens`; empty to show the column's name and
            the value.
        said_as: for single values that need other words, these words; `""` for a value that a page does not mention.
        type: type of the values: str, int, float, bool, list or dict.
        hint: the same type, including the types of its entries.
        words: texts that the column may contain in place of a number.
        optional: whether a value may be None.
    """

    field: str
    part: str = ""
    kind: str
    text: str
    unit: str
    path: str = ""
    pools: Pooling | None = None
    per: str = ""
    phrase: str = ""
    said_as: Mapping[Any, str]
    type: Any
    hint: Any
    words: tuple[str, ...]
    optional: bool

    def of(self, row: Row) -> Any:
        """The row's value in this column; None if it is not known."""
        value = getattr(row, self.field)
        return value.parts()[self.part] if self.part and value is not None else value


def _column(kind: str, text: str, unit: str = "", **further: Any) -> Any:
    """A field whose metadata describes its column."""
    metadata = {"kind": kind, "text": text, "unit": unit, "said_as": {}, **further}
    return field(default=None, metadata=metadata)


def setting(text: str, path: str = "", unit: str = "", **wording: Any) -> Any:
    """A column that contains a setting.

    Args:
        path: the name of the setting in the command's settings; empty if the command fills in the column.
        wording: values of `phrase` and `said_as` of `ColumnDescription`.
    """
    return _column("setting", text, unit, path=path, **wording)


def pooled(pools: Pooling, text: str, unit: str = "", *, per: str = "") -> Any:
    """A figure that is pooled over repeated runs, by the rules `pools` and `per` of `ColumnDescription`."""
    return _column("figure", text, unit, pools=pools, per=per)


figure = functools.partial(_column, "figure")
circumstance = functools.partial(_column, "circumstance")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The columns that all rows have.

    Attributes:
        kind: the name of the file, without `.csv`.
        recognised_by: columns that occur together only in files of this kind.
    """

    kind: ClassVar[str]
    recognised_by: ClassVar[tuple[str, ...]]

    run: str | None = circumstance("unique id of the run that wrote the row; ids sort by time")

    @classmethod
    @functools.cache
    def columns(cls) -> dict[str, ColumnDescription]:
        """Column names in the file's order, each with its description."""
        hints = typing.get_type_hints(cls)
        described = {column.name: _described(column, hints[column.name]) for column in fields(cls)}
        # After `_FIRST`, the columns of the class itself, and then those of its ancestors.
        order = list(_FIRST)
        for ancestor in cls.__mro__:
            order += inspect.get_annotations(ancestor)
        columns: dict[str, ColumnDescription] = {}
        for name in dict.fromkeys(order):
            columns |= described.get(name, {})
        return columns

    def values(self) -> dict[str, Any]:
        """The row's values, by column. An interval has four columns: its estimate, its two bounds and its coverage."""
        return {name: column.of(self) for name, column in self.columns().items()}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `values`. If a bound of an interval is missing or contradicts the estimate, the interval gets
        no bounds.
        """
        columns = cls.columns()
        fields_of_row: dict[str, Any] = {}
        for name, value in values.items():
            part = columns[name].part if name in columns else ""
            if part == "estimate":
                fields_of_row[name] = _interval_in(values, name)
            elif not part:
                fields_of_row[name] = value
        return cls(**fields_of_row)

    def cells(self) -> dict[str, Any]:
        """The row's values as they are written to a file, by column: lists and mappings as JSON."""
        cells = self.values()
        for name, value in cells.items():
            if isinstance(value, list | tuple | dict):
                cells[name] = json.dumps(value)
        return cells

    @classmethod
    def parse(cls, cells: Mapping[str, str]) -> Self:
        """The inverse of `cells`, from texts. Unknown columns are ignored. A value that is missing or unreadable
        becomes None.

        An empty cell becomes None, too, except in a column of texts that cannot be None: there it is an empty text.
        """
        columns = cls.columns()
        # Most cells of a row are empty; their fields keep the default.
        filled = {name for name, cell in cells.items() if cell} & columns.keys()
        filled |= {name for name, column in columns.items() if not column.optional}
        return cls.from_values({name: _parsed(cells.get(name), columns[name]) for name in filled})

    @classmethod
    def setting_columns(cls, settings: Any) -> dict[str, Any]:
        """The columns that contain settings, by name; None for a setting that `settings` do not have."""
        columns: dict[str, Any] = {}
        for name, column in cls.columns().items():
            if not column.path:
                continue
            # Without a draft, the path `draft.name` leads to None.
            value = settings
            for part in column.path.split("."):
                value = getattr(value, part, None)
            columns[name] = value
        return columns


def kind_of(header: Iterable[str], kinds: Iterable[type[Row]]) -> type[Row] | None:
    """The kind of row, of the given kinds, that a file with these columns contains; None if it is another file."""
    columns = set(header)
    fitting = (kind for kind in kinds if columns.issuperset(("run", *kind.recognised_by)))
    return next(fitting, None)


def _described(column: Field[Any], hint: Any) -> dict[str, ColumnDescription]:
    """The columns of a field with the type `hint`, such as `list[int] | None`; one column, or four for an interval."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if is_union else (hint,)
    words: tuple[str, ...] = ()
    values = []
    for part in parts:
        if typing.get_origin(part) is Literal:
            words += typing.get_args(part)
        elif part is not types.NoneType:
            values.append(part)
    described = ColumnDescription(
        field=column.name,
        **column.metadata,
        type=typing.get_origin(values[0]) or values[0],
        hint=functools.reduce(operator.or_, values),
        words=words,
        optional=types.NoneType in parts,
    )
    if described.hint is not Interval:
        return {column.name: described}
    number = replace(described, type=float, hint=float)
    covers = replace(described, part="covers", type=dict, hint=dict[str, Any])
    return {
        column.name: replace(number, part="estimate"),
        f"{column.name}_low": replace(number, part="low"),
        f"{column.name}_high": replace(number, part="high"),
        f"{column.name}_covers": covers,
    }


def _interval_in(values: Mapping[str, Any], name: str) -> Interval | None:
    """The interval in the columns `<name>`, `<name>_low` and so on; None without an estimate (see
    `Row.from_values`).
    """
    estimate, low, high = (values.get(f"{name}{end}") for end in ("", "_low", "_high"))
    covers = Coverage.read(values.get(f"{name}_covers"))
    if estimate is None:
        return None
    # In a damaged file the bounds may be on the wrong side of the estimate.
    if low is None or high is None or not low <= estimate <= high:
        return Interval(estimate, covers=covers)
    return Interval(estimate, low, high, covers)


def _parsed(cell: str | None, column: ColumnDescription) -> Any:
    """The value in a cell; None if it cannot be read."""
    if not cell:
        return cell if column.type is str and not column.optional else None
    if cell in column.words or column.type is str:
        return cell
    return _parsed_value(cell, column)


@functools.cache
def strict(hint: Any) -> TypeAdapter[Any]:
    """A validator that accepts only values of a type, without converting other values, and only finite numbers."""
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


# Cached, because thousands of rows repeat a few values.
@functools.lru_cache(maxsize=20_000)
def _parsed_value(cell: str, column: ColumnDescription) -> Any:
    """The value of a cell that contains Python's or JSON's notation of a value that is not a text; None if it cannot be
    read.
    """
    # Of the values with a unit, only log-probabilities and lower bounds may be negative.
    if cell.startswith("-") and column.unit not in ("", "nats") and column.part != "low":
        return None
    with suppress(ValueError, RecursionError):
        text = _IN_JSON.get(cell, cell)
        value = json.loads(text, parse_int=_whole_number, parse_float=_number)
        return strict(column.hint).validate_python(value)
    return None


def _whole_number(digits: str) -> int:
    number = int(digits)
    if abs(number) >= _MOST:
        raise ValueError(digits)
    return number


def _number(digits: str) -> float:
    """A number with a decimal point. A whole number becomes an int, because pandas writes `4.0` in columns with empty
    cells.
    """
    number = float(digits)
    is_whole = abs(number) < _MOST_AS_FLOAT and number.is_integer()
    return int(number) if is_whole else number
