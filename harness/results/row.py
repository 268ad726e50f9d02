"""A row of a CSV file as a dataclass whose fields describe its columns.

batch_size: int | None = setting("rows decoded at once", "batch_size")
ms_per_token: float | None = figure("time per token of a row", "ms")
speedup: Interval | None = pooled("mean", "regular over speculative time")
devices: str | None = circumstance("names of the devices that computed")
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

# The columns that a file begins with, so far as it has them.
_FIRST = (
    "run job model draft arm check verdict batch_size num_draft_tokens temperature seed".split()
)

# A damaged file may hold a whole number of any length.
_MOST = 2**64
# Every whole number up to here is one float.
_MOST_AS_FLOAT = 2**53
# Truth values as `csv` and spreadsheets write them.
_IN_JSON = {"True": "true", "False": "false", "TRUE": "true", "FALSE": "false"}


# How runs are pooled: mean, sum, largest or smallest value (of lists, place by place); the mean of ratios, or of
# standard deviations; true if it is true of all, or of any; the value that all runs have in common; or none.
Pooling = (
    Literal["mean", "geometric mean", "quadratic mean", "sum", "largest", "smallest"]
    | Literal["all", "any", "same", "none"]
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnDescription:
    """A column, as the field of a row describes it.

    The field `num_draft_tokens: int | Literal["auto"] | None` has the type and hint int, the words ("auto",), and is
    optional. `acceptance_by_position: list[float | None] | None` has the type list and the hint list[float | None].

    The field `speedup: Interval | None` is described as four columns: `speedup`, `speedup_low`, `speedup_high` and
    `speedup_covers`. The text is about the estimate.

    Attributes:
        field: of the row.
        part: of an interval, `estimate`, `low`, `high` or `covers`; empty for any other field.
        kind: `setting` for what the user asked for, `figure` for what was measured or computed, `circumstance` for
            where, when and with what that was done.
        text: one line for `harness help columns`.
        unit: of its values; empty for none.
        pools: how a figure of several runs becomes one, for rows that are pooled (`pooling.py`). Of an interval the
            estimate alone is pooled: means of ends would be no interval over several runs.
        per: the figure below the line of a rate. A mean over runs is weighted by it, which makes it total over total.
        path: of a setting in the command's settings, `decoding.top_k`; empty where the command fills it in.
        phrase: how a value reads, `{} new tokens`; empty for its name and the value.
        said_as: single values that read otherwise; `""` is of one that goes without saying.
        type: of its values: str, int, float, bool, list or dict.
        hint: the same with the types of entries.
        words: texts that may stand in place of a number.
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
        """The value that a row has in this column; None for none."""
        value = getattr(row, self.field)
        return value.parts()[self.part] if self.part and value is not None else value


def _column(kind: str, text: str, unit: str = "", **further: Any) -> Any:
    """A field with what is described of its column."""
    metadata = {"kind": kind, "text": text, "unit": unit, "said_as": {}, **further}
    return field(default=None, metadata=metadata)


def setting(text: str, path: str = "", unit: str = "", **words: Any) -> Any:
    """A column that repeats a setting; `path` is where the command's settings have it, and `words` are `phrase` and
    `said_as` of `ColumnDescription`.
    """
    return _column("setting", text, unit, path=path, **words)


def pooled(pools: Pooling, text: str, unit: str = "", *, per: str = "") -> Any:
    """A figure of rows that are pooled over repeated runs, and how; see `ColumnDescription`."""
    return _column("figure", text, unit, pools=pools, per=per)


figure = functools.partial(_column, "figure")
circumstance = functools.partial(_column, "circumstance")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The columns of all rows.

    Attributes:
        kind: stem of the file's name.
        recognised_by: columns that only files of this kind have together.
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
        order = list(_FIRST)
        for ancestor in cls.__mro__:
            order += inspect.get_annotations(ancestor)
        columns: dict[str, ColumnDescription] = {}
        for name in dict.fromkeys(order):
            columns |= described.get(name, {})
        return columns

    def values(self) -> dict[str, Any]:
        """The row by its columns: the estimate and the ends of an interval each have one."""
        return {name: column.of(self) for name, column in self.columns().items()}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `values`. An interval that lacks one of its ends has neither."""
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
        """The row as it is written; lists and mappings as JSON."""
        cells = self.values()
        for name, value in cells.items():
            if isinstance(value, list | tuple | dict):
                cells[name] = json.dumps(value)
        return cells

    @classmethod
    def parse(cls, cells: Mapping[str, str]) -> Self:
        """The reverse of `cells`, from text. Foreign columns are ignored; what is absent or cannot be read is None.

        An empty cell is None too, except in a column that always has text.
        """
        columns = cls.columns()
        # Most cells of a row are empty, and have the default.
        filled = {name for name, cell in cells.items() if cell} & columns.keys()
        filled |= {name for name, column in columns.items() if not column.optional}
        return cls.from_values({name: _parsed(cells.get(name), columns[name]) for name in filled})

    @classmethod
    def setting_columns(cls, settings: Any) -> dict[str, Any]:
        """The columns that repeat `settings`, by name."""
        columns: dict[str, Any] = {}
        for name, column in cls.columns().items():
            if not column.path:
                continue
            # A path such as `draft.name`: None where there is no draft, or no such setting.
            value = settings
            for part in column.path.split("."):
                value = getattr(value, part, None)
            columns[name] = value
        return columns


def kind_of(header: Iterable[str], kinds: Iterable[type[Row]]) -> type[Row] | None:
    """The kind of the rows in a file with these columns; None for a file of none of these kinds."""
    columns = set(header)
    fitting = [kind for kind in kinds if columns.issuperset(("run", *kind.recognised_by))]
    # Where a kind has all columns of another one and more, files with all of them are its own.
    return max(fitting, key=lambda kind: len(kind.columns()), default=None)


def _described(column: Field[Any], hint: Any) -> dict[str, ColumnDescription]:
    """The columns of a field whose type is `hint`, such as `list[int] | None`."""
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
    """The interval in the columns `speedup`, `speedup_low` and so on; see `Row.from_values`."""
    estimate, low, high = (values.get(f"{name}{end}") for end in ("", "_low", "_high"))
    covers = Coverage.read(values.get(f"{name}_covers"))
    if estimate is None:
        return None
    # Bounds of a damaged file may be on the wrong side.
    if low is None or high is None or not low <= estimate <= high:
        return Interval(estimate, covers=covers)
    return Interval(estimate, low, high, covers)


def _parsed(cell: str | None, column: ColumnDescription) -> Any:
    """The value in a cell; None where it cannot be read."""
    if not cell:
        return cell if column.type is str and not column.optional else None
    if cell in column.words or column.type is str:
        return cell
    return _parsed_value(cell, column)


@functools.cache
def strict(hint: Any) -> TypeAdapter[Any]:
    """A validator of values of a type as they are, without converting them, and of finite numbers alone."""
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


# Of thousands of rows most have the same value, or one of a few.
@functools.lru_cache(maxsize=20_000)
def _parsed_value(cell: str, column: ColumnDescription) -> Any:
    """The value of a cell that is no text, written by Python or as JSON; None where it cannot be read."""
    # Of all that has a unit, log-probabilities and lower ends alone may be negative.
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
    """A number with a decimal point; a whole one is an integer, because pandas writes `4.0` in columns with gaps."""
    number = float(digits)
    is_whole = abs(number) < _MOST_AS_FLOAT and number.is_integer()
    return int(number) if is_whole else number
