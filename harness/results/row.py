"""A row of a CSV file as a dataclass whose fields describe its columns.

batch_size: int | None = setting("rows decoded at once", "batch_size")
ms_per_token: float | None = figure("time per token of a row", "ms")
devices: str | None = circumstance("names of the devices that computed")
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

# The columns that a file begins with, so far as it has them.
_FIRST = (
    "run job model draft arm check verdict batch_size num_draft_tokens temperature seed".split()
)

# A damaged file may hold a number of any length.
_LARGEST = 2**63

# Mean, sum, largest or smallest value over runs (of lists, place by place); whether it is true of
# all or of any; the value that all runs have; or nothing.
Pooling = Literal["mean", "sum", "largest", "smallest", "all", "any", "same", "none"]


@dataclass(frozen=True)
class ColumnDescription:
    """A column, as the field of a row describes it.

    The field `num_draft_tokens: int | Literal["auto"] | None` has the type and hint int, the words ("auto",), and is
    optional. `acceptance_by_position: list[float | None] | None` has the type list and the hint list[float | None].

    Attributes:
        kind: `setting` for what the user asked for, `figure` for what was measured or computed, `circumstance` for
            where, when and with what that was done.
        text: one line for `docs/columns.md`.
        unit: of its values; empty for none.
        pools: how a figure of several runs becomes one, for rows that are pooled (`pooling.py`).
        path: of a setting in the command's settings, `decoding.top_k`; empty where the command fills it in.
        type: of its values: str, int, float, bool, list or dict.
        hint: the same with the types of entries.
        words: texts that may stand in place of a number.
        optional: whether a value may be None.
    """

    kind: str
    text: str
    unit: str
    path: str
    pools: Pooling | None
    type: Any
    hint: Any
    words: tuple[str, ...]
    optional: bool


def _column(
    kind: str, text: str, unit: str = "", path: str = "", pools: Pooling | None = None
) -> Any:
    metadata = {"kind": kind, "text": text, "unit": unit, "path": path, "pools": pools}
    return field(default=None, metadata=metadata)


def setting(text: str, path: str = "", unit: str = "") -> Any:
    """A column of this kind; see `ColumnDescription`."""
    return _column("setting", text, unit, path)


def pooled(pools: Pooling, text: str, unit: str = "") -> Any:
    """A figure of rows that are pooled over repeated runs, and how; see `ColumnDescription`.

    Ends of an interval within one run are `none`: their means would be no interval over several.
    """
    return _column("figure", text, unit, pools=pools)


figure = functools.partial(_column, "figure")
circumstance = functools.partial(_column, "circumstance")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The columns of all rows.

    Attributes:
        kind: stem of the file's name.
        recognised_by: columns that tell a file of this kind from the others.
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
        return {name: described[name] for name in dict.fromkeys(order) if name in described}

    def cells(self) -> dict[str, Any]:
        """The row as it is written; lists and mappings as JSON."""
        cells = {name: getattr(self, name) for name in self.columns()}
        for name, value in cells.items():
            if isinstance(value, list | tuple | dict):
                cells[name] = json.dumps(value)
        return cells

    @classmethod
    def parse(cls, cells: Mapping[str, str]) -> Self:
        """The reverse of `cells`, from text. Foreign columns are ignored; what is absent or cannot be read is None.

        An empty cell is None too, except in a column that always has text.
        """
        columns = cls.columns().items()
        return cls(**{name: _parsed(cells.get(name), column) for name, column in columns})

    @classmethod
    def setting_columns(cls, settings: Any) -> dict[str, Any]:
        """The columns that repeat what `settings` say."""
        columns = cls.columns().items()
        return {name: _look_up(settings, column.path) for name, column in columns if column.path}


def kind_of(header: Iterable[str], kinds: Iterable[type[Row]]) -> type[Row] | None:
    """The kind of the rows in a file with these columns; None for a file of none of these kinds."""
    columns = set(header)
    fitting = [kind for kind in kinds if columns.issuperset(("run", *kind.recognised_by))]
    # Some add columns to others.
    return max(fitting, key=lambda kind: len(kind.columns()), default=None)


def _described(column: Field[Any], hint: Any) -> ColumnDescription:
    """The description of a field whose type is `hint`, such as `list[int] | None`."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if is_union else (hint,)
    words: tuple[str, ...] = ()
    values = []
    for part in parts:
        if typing.get_origin(part) is Literal:
            words += typing.get_args(part)
        elif part is not types.NoneType:
            values.append(part)
    return ColumnDescription(
        **column.metadata,
        type=typing.get_origin(values[0]) or values[0],
        hint=functools.reduce(operator.or_, values),
        words=words,
        optional=types.NoneType in parts,
    )


def _parsed(cell: str | None, column: ColumnDescription) -> Any:
    """The value in a cell; None where it cannot be read."""
    if not cell:
        return cell if column.type is str and not column.optional else None
    if cell in column.words:
        return cell
    try:
        value = _converted(cell, column.type)
    except (KeyError, ValueError, RecursionError):
        return None
    return value if _fits(value, column.hint) else None


def _converted(cell: str, kind: Any) -> Any:
    if kind is bool:
        return {"True": True, "False": False}[cell]
    # Some columns have either a number or a list of numbers.
    is_list = cell.startswith("[") and kind in (int, float)
    if is_list or kind in (list, dict):
        return json.loads(cell)
    return kind(cell)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a column's type, entries of lists and mappings included; numbers must be finite."""
    origin = typing.get_origin(hint)
    entries = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, part) for part in entries)
    if origin is list:
        return isinstance(value, list) and all(_fits(entry, entries[0]) for entry in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(entry, entries[1]) for entry in value.values())
    if hint is Any:
        return True
    if isinstance(value, bool):
        return hint is bool
    if isinstance(value, int) and abs(value) > _LARGEST:
        return False
    if hint is float:
        # JSON has whole numbers without a point.
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, hint)


def _look_up(settings: Any, path: str) -> Any:
    """The value at a path such as `draft.name`; None where there is no draft, or no such setting."""
    value = settings
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name, None)
    return value
