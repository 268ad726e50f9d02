"""Names of rows among others: the pair, and the settings and circumstances in which rows differ."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.commands.read_runs import Run
from harness.commands.words import FIRST_SETTINGS, in_words, pair_name
from harness.results.schema import RunRow

# Columns that are no reason for a difference (`run` to `setup_s`), or that the pair's name or
# another place of the report shows. The address of a server is among its devices.
_NEVER_IN_NAMES = frozenset(
    "run job repeat status error timestamp directory measurement settings setup_s model draft num_draft_tokens"
    " weights quantization dtype synthetic_acceptance lossy task operands view server request_rate output url".split()
)
# By the first word of a setting's path, columns in which rows must be equal to be compared in that
# setting: rows with different drafts always differ in `draft.repository`, for example.
_COMPARED_WITHIN = {
    "model": ("model",),
    "draft": ("draft",),
    "engine": ("engine", "server"),
    "prompts": ("prompts",),
}


@dataclass
class Name:
    """Name of a row among others.

    Attributes:
        pair: see `pair_name`.
        settings: those in which rows differ, in words; K left out.
        circumstances: those that distinguish the row from others with the same settings, in words.
    """

    pair: str
    num_draft_tokens: int | str | None
    settings: list[str] = field(default_factory=list)
    circumstances: list[str] = field(default_factory=list)

    @property
    def group(self) -> tuple[str, ...]:
        """The same value for rows that differ in K or in circumstances alone, as in versions.

        Devices and runners count as settings here (`FIRST_SETTINGS`).
        """
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

    Names have every setting in which rows differ, so that a table never hides that two settings
    were changed at once. Settings of a model, a draft, an engine or a prompt set are compared among
    rows with the same one. Circumstances are named only where settings do not suffice: all those in
    which rows differ that would otherwise have the same name.

    Three rows of one pair, at batch size 1 with seed 0, at 4 with seed 0 and at 4 with seed 1, are
    `13B with 7B`, `13B with 7B · batches of 4` and `13B with 7B · batches of 4 · seed 1`: seed 0, a
    default, needs no word.
    """
    names = [name_of(row) for row in rows]
    settings, circumstances = _columns_in_names(rows)
    for column, path in settings.items():
        peers = [_peers(row, path) for row in rows]
        for name, text in zip(names, _differing(rows, column, peers), strict=True):
            name.settings += text
    labels = [name.label() for name in names]
    for column in circumstances:
        for name, text in zip(names, _differing(rows, column, labels), strict=True):
            name.circumstances += text
    return names


def named_runs(runs: Sequence[Run]) -> list[Named]:
    """Runs with their names, sorted by pair and K."""
    rows = [run.last for run in runs]
    named = map(Named, told_apart(rows), runs, rows)
    return sorted(named, key=lambda one: (one.name.group, one.name.k_order))


def _columns_in_names(rows: Sequence[RunRow]) -> tuple[dict[str, str], list[str]]:
    """Settings that may be in names, each with its path, and circumstances.

    The path is empty for those that readers look at first. The column `settings` has changed
    settings that have no column, by their paths; each of these counts as a column.
    """
    settings = dict.fromkeys(FIRST_SETTINGS, "")
    circumstances = []
    columns = type(rows[0]).columns() if rows else {}
    for name, column in columns.items():
        if name in settings or name in _NEVER_IN_NAMES:
            continue
        if column.kind == "setting":
            settings[name] = column.path
        elif column.kind == "circumstance":
            circumstances.append(name)
    entries: set[str] = set()
    for row in rows:
        entries.update(row.settings or ())
    for entry in sorted(entries):
        settings[f"settings.{entry}"] = entry
    return settings, circumstances


def _peers(row: RunRow, path: str) -> Hashable:
    """The same value for rows that are compared in the setting with this path."""
    columns = _COMPARED_WITHIN.get(path.partition(".")[0], ())
    return tuple(getattr(row, column, None) for column in columns)


def _differing(rows: Sequence[RunRow], column: str, peers: Sequence[Hashable]) -> list[list[str]]:
    """For each row [its value of a column in words] if a peer has another value, else [].

    Args:
        peers: a value for each row; rows with the same one are compared with each other.
    """
    # None where a row does not know its value. Empty for one that goes without saying, which is a
    # value all the same.
    texts = [in_words(row, column) for row in rows]
    values: dict[Hashable, set[str]] = {}
    for group, text in zip(peers, texts, strict=True):
        if text is not None:
            values.setdefault(group, set()).add(text)
    return [
        [text] if text and len(values[group]) > 1 else []
        for group, text in zip(peers, texts, strict=True)
    ]
