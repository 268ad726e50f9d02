"""Columns of the CSV files by the question they answer, as rows describe them: what `harness help columns` and the
site's page are made of.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from harness.commands.registry import row_kinds
from harness.results.row import ColumnDescription
from harness.results.schema import CORE_COLUMNS

CORE = "The core dozen"
# Figures by the question they answer. The first pattern that is found in a column's name decides.
_TOPICS = {
    "Is it faster, and how sure is that?": (
        r"^arm$|speedup|visible_difference|pooled_runs|interleaved|num_(different_)?prompts|aa_ratio"
    ),
    "How much is accepted?": (r"accept|per_iteration|proposed|mean_num_draft|_end$|undivided"),
    "What did the servers do?": (
        r"server|foreign|unseen|uncounted|restarts|drafted|preempt|cache|read_prompt|salted"
        r"|in_flight|offered|arrival|num_failed|requests_per"
    ),
    "How long does a token take?": (
        r"ms_per_token|tokens_per_second|first_token|per_output|inter_token|num_(prompt_)?tokens|_answer$"
    ),
    "Where does the time go?": r"_ms$|8bit|experts|bytes|floor",
    "Was the machine quiet, and the work the same?": (
        r"drift|processor|^load$|cores|gpu|throttled|units|identical"
        r"|difference|divergence|margin|skipped|truncated"
    ),
}
_OTHER_FIGURES = "Other figures"
_SETTINGS = "What was asked for?"
_CIRCUMSTANCES = "With what, where and when?"


class Column(NamedTuple):
    """A column as it is listed; one with an interval has a `±` behind its name, and stands for four.

    Attributes:
        type: of its values, `float`.
        unit: of its values; empty for none.
    """

    name: str
    type: str
    unit: str
    meaning: str


def columns_by_topic() -> dict[str, dict[Column, list[str]]]:
    """Every column with the files that have it, without `.csv`; the core first, and those of one file last."""
    titles = [CORE, *_TOPICS, _OTHER_FIGURES, _SETTINGS, _CIRCUMSTANCES]
    topics: dict[str, dict[Column, list[str]]] = {title: {} for title in titles}
    for kind in row_kinds():
        for name, column in kind.columns().items():
            if column.part in ("", "estimate"):
                files = topics[_topic(name, column)]
                files.setdefault(_listed(name, column), []).append(kind.kind)
    for kind in row_kinds():
        if kind.kind != "latency":
            topics[(kind.__doc__ or "").strip()] = _taken_out(topics, [kind.kind])
    return {title: columns for title, columns in topics.items() if columns}


def _topic(name: str, column: ColumnDescription) -> str:
    if name in CORE_COLUMNS:
        return CORE
    if column.kind == "setting":
        return _SETTINGS
    if column.kind == "circumstance":
        return _CIRCUMSTANCES
    found = (topic for topic, pattern in _TOPICS.items() if re.search(pattern, name))
    return next(found, _OTHER_FIGURES)


def _listed(name: str, column: ColumnDescription) -> Column:
    interval = " ±" if column.part == "estimate" else ""
    meaning = column.text if column.in_csv else f"{column.text}; in `result.json` alone"
    return Column(name + interval, column.type.__name__, column.unit, meaning)


def _taken_out(
    topics: dict[str, dict[Column, list[str]]], files: list[str]
) -> dict[Column, list[str]]:
    """The columns that exactly these files have, which are no longer in a topic."""
    found = {}
    for columns in topics.values():
        for column in [each for each, stems in columns.items() if stems == files]:
            found[column] = columns.pop(column)
    return found
