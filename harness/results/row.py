"""A row of a CSV file as a dataclass whose fields describe its columns."""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

# The columns that a file begins with, so far as it has them.
_FIRST = (
    "run job model draft arm check verdict batch_size num_draft_tokens temperature seed".split()
)


def _column(kind: str, text: str, unit: str = "", path: str = "") -> Any:
    return field(default=None, metadata={"kind": kind, "text": text, "unit": unit, "path": path})


def setting(text: str, path: str = "", unit: str = "") -> Any:
    """A column that repeats what the user asked for.

    Args:
        text: one line for `docs/columns.md`.
        path: of the value in the command's settings, `decoding.top_k`; empty where the command fills it in.
    """
    return _column("setting", text, unit, path)


# A column with something that was measured or computed, and one that says where, when and with what a row was made.
figure = functools.partial(_column, "figure")
circumstance = functools.partial(_column, "circumstance")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The columns of all rows.

    Attributes:
        kind: stem of the file's name.
        signature: columns by which a file of this kind is recognised.
    """

    kind: ClassVar[str]
    signature: ClassVar[tuple[str, ...]]

    run: str | None = circumstance("unique id of the run that wrote the row; ids sort by time")

    @classmethod
    @functools.cache
    def columns(cls) -> dict[str, Mapping[str, Any]]:
        """Column names in the file's order, each with its text, unit, path and kind.

        `type` is that of its values (str, int, float, bool, list or dict), `hint` the same with the types of entries,
        `words` are those that may stand in place of a number, and `optional` says if they may be None.
        """
        hints = typing.get_type_hints(cls)
        described = {
            column.name: {**column.metadata, **_value_type(hints[column.name])}
            for column in fields(cls)
        }
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
        return cls(**{name: _parsed(cells.get(name), **about) for name, about in columns})

    @classmethod
    def setting_columns(cls, settings: Any) -> dict[str, Any]:
        """The columns that repeat what `settings` say."""
        return {
            name: _look_up(settings, about["path"])
            for name, about in cls.columns().items()
            if about["path"]
        }


def _value_type(hint: Any) -> dict[str, Any]:
    """`list`, and optional, for `list[int] | None`."""
    parts = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )
    words: tuple[str, ...] = ()
    for part in parts:
        if typing.get_origin(part) is Literal:
            words += typing.get_args(part)
    kinds = [part for part in parts if part is not types.NoneType]
    kind = kinds[0]
    values = [part for part in kinds if typing.get_origin(part) is not Literal]
    return {
        "type": typing.get_origin(kind) or kind,
        "hint": functools.reduce(operator.or_, values) if values else kind,
        "optional": types.NoneType in parts,
        "words": words,
    }


def _parsed(
    cell: str | None, type: Any, hint: Any, optional: bool, words: tuple[str, ...], **_: Any
) -> Any:
    if not cell:
        return cell if type is str and not optional else None
    if cell in words:
        return cell
    try:
        if type is bool:
            return {"True": True, "False": False}[cell]
        is_list = cell.startswith("[") and type in (int, float)
        value = json.loads(cell) if is_list or type in (list, dict) else type(cell)
    except (KeyError, ValueError, RecursionError):
        return None
    return value if _fits(value, hint) else None


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
    if hint is float:
        # JSON has whole numbers without a point.
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, hint)


def _look_up(settings: Any, path: str) -> Any:
    value = settings
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name, None)
    return value
