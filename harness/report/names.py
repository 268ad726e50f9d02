"""Names of rows among others: the pair, and the settings and circumstances in which rows differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from harness.report.runs import Run
from harness.report.words import FIRST_SETTINGS, in_words, pair_name
from harness.results.schema import RunRow

# Shown elsewhere, or no reason for a difference.
_NEVER_IN_NAMES = frozenset(
    "run job repeat status error timestamp directory measurement settings setup_s model draft num_draft_tokens"
    " quantization dtype synthetic_acceptance lossy task operands view server".split()
)


@dataclass
class Name:
    """Name of a row among others.

    Attributes:
        pair: see `pair_name`.
        settings: those in which the rows of the report, or of the pair, differ; K left out.
        circumstances: those that distinguish the row from others with the same settings.
    """

    pair: str
    num_draft_tokens: int | str | None
    settings: list[str] = field(default_factory=list)
    circumstances: list[str] = field(default_factory=list)

    @property
    def group(self) -> tuple[str, ...]:
        """The same value for rows that differ in K alone."""
        return self.pair, *self.settings

    @property
    def k_order(self) -> float:
        """Orders names by K, `auto` last."""
        return math.inf if isinstance(self.num_draft_tokens, str) else self.num_draft_tokens or 0

    @property
    def details(self) -> list[str]:
        return [*self.settings, *self.circumstances]

    @property
    def cell(self) -> str:
        """First cell of a table: the pair, and a second line with its details."""
        return f"{self.pair}\n{' · '.join(self.details)}".strip()

    def label(self, separator: str = " · ") -> str:
        """The name in one line."""
        k = [f"K={self.num_draft_tokens}"] if self.num_draft_tokens else []
        return separator.join([self.pair, *k, *self.details])


class Named(NamedTuple):
    """A run and one of its rows, with what distinguishes the run from others."""

    name: Name
    run: Run
    row: Any


def name_of(row: RunRow) -> Name:
    """The name of a row that nothing else has to be distinguished from."""
    return Name(pair_name(row), row.num_draft_tokens if row.draft else None)


def told_apart(rows: Sequence[RunRow]) -> list[Name]:
    """The name of each row among the others.

    A setting that readers look at first is in the names if any rows differ in it; other settings
    if rows that cannot be told apart yet, but for K, differ in it; a circumstance only if two rows
    would have the same name without it. Rows of one pair at batch size 1, and at 4 with two
    seeds, are `13B with 7B`, `13B with 7B · batches of 4 · seed 0` and `... · seed 1`.
    """
    names = [name_of(row) for row in rows]
    if not rows:
        return []
    for column in FIRST_SETTINGS:
        _add_if_different(column, rows, names, rivals=lambda name: None)
    settings, circumstances = _other_columns(rows)
    for column in settings:
        _add_if_different(column, rows, names, rivals=attrgetter("group"))
    for column in circumstances:
        _add_if_different(column, rows, names, Name.label, part="circumstances")
    return names


def named_runs(runs: Sequence[Run]) -> list[Named]:
    """Name runs, and sort them by pair and K."""
    rows = [run.last for run in runs]
    named = map(Named, told_apart(rows), runs, rows)
    return sorted(named, key=lambda one: (one.name.group, one.name.k_order))


def _add_if_different(
    column: str,
    rows: Sequence[RunRow],
    names: Sequence[Name],
    rivals: Callable[[Name], object],
    part: str = "settings",
) -> None:
    """Add a column's value to the names of rows that differ in it from one of their rivals.

    Args:
        rivals: has the same value for names that are compared with each other.
        part: attribute of the name that gets the value.
    """
    # None where a row does not know it; empty for a default, which needs no word but is a value.
    texts = [in_words(row, column) for row in rows]
    groups = [rivals(name) for name in names]
    values_of: dict[object, set[str]] = {}
    for group, text in zip(groups, texts, strict=True):
        if text is not None:
            values_of.setdefault(group, set()).add(text)
    for name, group, text in zip(names, groups, texts, strict=True):
        if text and len(values_of[group]) > 1:
            getattr(name, part).append(text)


def _other_columns(rows: Sequence[RunRow]) -> tuple[list[str], list[str]]:
    """Settings, those without a column included, and circumstances that may be in names."""
    columns: dict[str, list[str]] = {"setting": [], "circumstance": [], "figure": []}
    for column, about in type(rows[0]).columns().items():
        if column not in FIRST_SETTINGS and column not in _NEVER_IN_NAMES:
            columns[about["kind"]].append(column)
    without_column: set[str] = set()
    for row in rows:
        without_column.update(row.settings or ())
    entries = [f"settings.{entry}" for entry in sorted(without_column)]
    return columns["setting"] + entries, columns["circumstance"]
