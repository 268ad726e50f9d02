"""Descriptions of settings and columns, read from their classes. The help texts and pages of the site use them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from harness.cli.conversion import fixed_groups, value_types
from harness.commands.registry import row_kinds
from harness.config.amounts import capitalised
from harness.config.engines import EngineSettings
from harness.config.errors import as_typed
from harness.config.run import PromptedSettings, RunSettings
from harness.config.settings import DraftSettings, ModelSettings
from harness.results.row import ColumnDescription
from harness.results.schema import CORE_COLUMNS

# The groups of settings that commands have, without `draft` and `engine`. Some commands have no `prompts`.
GROUPS = dict(sorted(fixed_groups(PromptedSettings).items()))


class Setting(NamedTuple):
    """One setting, or a preset, a draft or an engine that can be typed.

    Attributes:
        name: the name as it is typed, `decoding.top_p`.
        meaning: half a line or more.
        choices: the words that the setting accepts; () for numbers, texts and lists.
        value: the setting's default, in general or for a command; MISSING if there is none.
    """

    name: str
    meaning: str
    choices: tuple[str, ...] = ()
    value: Any = dataclasses.MISSING


def described(kind: type, prefix: str = "", without: Collection[str] = ()) -> list[Setting]:
    """The settings of a class, with the meanings in its docstring. Groups of settings such as `decoding` are left out.

    Args:
        prefix: the beginning of each name, `draft.`.
        without: names of fields to leave out, too.
    """
    meanings = _meanings(kind)
    types = value_types(kind)
    settings = []
    for field in dataclasses.fields(kind):
        if field.name in without or field.name not in types:
            continue
        # For a setting whose value is a name in a registry, the metadata have a function that returns all names.
        names_of_choices = field.metadata.get("choices")
        choices = tuple(names_of_choices()) if names_of_choices else _choices(types[field.name])
        meaning = meanings.get(field.name, "")
        settings.append(Setting(prefix + field.name, meaning, choices, field.default))
    return settings


def _meanings(kind: type) -> dict[str, str]:
    """The meanings of a dataclass's fields, from the section `Attributes:` in its docstring and its base classes'."""
    meanings: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(ancestor):
            continue
        _, _, section = inspect.cleandoc(ancestor.__doc__ or "").partition("Attributes:\n")
        # The section ends where a line is not indented.
        attributes = re.split(r"\n(?=\S)", section)[0]
        # Matches "    name: meaning", and further lines that are indented more.
        for name, lines in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE):
            text = " ".join(lines.split())
            # Write values as a user types them: `null`, `true`.
            for value in (None, True, False):
                text = re.sub(rf"\b{value}\b", as_typed(value), text)
            meanings[name] = text
    return meanings


def _choices(hint: Any) -> tuple[str, ...]:
    """The words that a value of this type may be."""
    if hint is bool:
        return ("true", "false")
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    return tuple(word for part in typing.get_args(hint) for word in _choices(part))


def group_settings(group: str) -> list[Setting]:
    """The settings of one of `GROUPS`, without those that are set by choosing a preset, `model=` or `prompts=`."""
    chosen = ("name", "repository", "file") if group in ("model", "prompts") else ()
    return described(GROUPS[group], f"{group}.", chosen)


def command_settings(kind: type[RunSettings]) -> tuple[list[Setting], list[Setting]]:
    """The settings outside groups: those of all commands, with this command's meanings; and the command's own."""
    common = value_types(RunSettings)
    settings = described(kind)
    own = [setting for setting in settings if setting.name not in common]
    return [setting for setting in settings if setting.name in common], own


def method_settings(kind: type[DraftSettings]) -> list[Setting]:
    """The settings of a drafting method, without those that every draft or every model has."""
    return described(kind, "draft.", value_types(DraftSettings) | value_types(ModelSettings))


def engine_settings(kind: type[EngineSettings]) -> list[Setting]:
    """The settings of an engine."""
    return described(kind, "engine.", {"name"})


def sentence(summary: str) -> str:
    """A record's summary as a sentence."""
    return f"{capitalised(summary)}."


# Columns --------------------------------------------------------------------------------------------

CORE = "The core dozen"
# The questions that figures answer. A column belongs to the first question whose pattern is found in its name.
_TOPICS = {
    "Is it faster, and how sure is that?": (
        r"^arm$|speedup|pooled_runs|interleaved|num_(different_)?prompts|aa_ratio"
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
    "Was the machine idle, and the work the same?": (
        r"drift|processor|^load$|cores|gpu|throttled|units|identical"
        r"|difference|divergence|margin|skipped"
    ),
}
_OTHER_FIGURES = "Other figures"
_SETTINGS = "What was asked for?"
_CIRCUMSTANCES = "With what, where and when?"


class Column(NamedTuple):
    """A column as it is listed. A figure with an interval, which is four columns in a file, is one `Column`, with a `±`
    after its name.

    Attributes:
        type: the type of the values, `float`.
        unit: the unit of the values; empty for none.
    """

    name: str
    type: str
    unit: str
    meaning: str


def columns_by_topic() -> dict[str, dict[Column, list[str]]]:
    """For each topic, its columns with the files that have them, without `.csv`.

    The core dozen comes first, and the columns of a single file come last, with the file's docstring as their topic.
    """
    titles = [CORE, *_TOPICS, _OTHER_FIGURES, _SETTINGS, _CIRCUMSTANCES]
    topics: dict[str, dict[Column, list[str]]] = {title: {} for title in titles}
    for kind in row_kinds():
        for name, column in kind.columns().items():
            if column.part in ("", "estimate"):
                files = topics[_topic(name, column)]
                files.setdefault(_listed(name, column), []).append(kind.kind)
    for kind in row_kinds():
        if kind.kind != "latency":
            topics[inspect.cleandoc(kind.__doc__ or "")] = _taken_out(topics, [kind.kind])
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
    return Column(name + interval, column.type.__name__, column.unit, column.text)


def _taken_out(
    topics: dict[str, dict[Column, list[str]]], files: list[str]
) -> dict[Column, list[str]]:
    """Remove the columns that exactly these files have from their topics, and return them."""
    found = {}
    for columns in topics.values():
        for column in [each for each, stems in columns.items() if stems == files]:
            found[column] = columns.pop(column)
    return found
