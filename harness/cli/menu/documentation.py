"""Settings as their own classes describe them: what `--help` and a page of the site are made of."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from harness.cli.menu.conversion import fixed_groups, value_types
from harness.config.amounts import capitalised
from harness.config.engines import EngineSettings
from harness.config.errors import as_typed
from harness.config.run import PromptedSettings, RunSettings
from harness.config.settings import DraftSettings, ModelSettings

# The groups of settings that commands have, some of them without `prompts`; apart from drafts and engines.
GROUPS = dict(sorted(fixed_groups(PromptedSettings).items()))


class Setting(NamedTuple):
    """One setting, or a preset, a draft or an engine that can be typed.

    Attributes:
        name: as it is typed, `decoding.top_p`.
        meaning: half a line or more.
        choices: the words that it takes; none for numbers, texts and lists.
        value: its default, or in `--help` the value that the typed settings give it; MISSING where there is none.
    """

    name: str
    meaning: str
    choices: tuple[str, ...] = ()
    value: Any = dataclasses.MISSING


def described(kind: type, prefix: str = "", without: Collection[str] = ()) -> list[Setting]:
    """The settings of a class as its docstring describes them; groups of settings such as `decoding` are left out.

    Args:
        prefix: before each name, `draft.`.
        without: fields that are left out too.
    """
    meanings = _meanings(kind)
    types = value_types(kind)
    settings = []
    for field in dataclasses.fields(kind):
        if field.name in without or field.name not in types:
            continue
        # The names of a registry, where a setting takes one of them.
        names_of_choices = field.metadata.get("choices")
        choices = tuple(names_of_choices()) if names_of_choices else _choices(types[field.name])
        meaning = meanings.get(field.name, "")
        settings.append(Setting(prefix + field.name, meaning, choices, field.default))
    return settings


def _meanings(kind: type) -> dict[str, str]:
    """The meanings of a dataclass's fields, from the `Attributes:` of its docstring and of its bases'."""
    meanings: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(ancestor):
            continue
        _, _, section = inspect.cleandoc(ancestor.__doc__ or "").partition("Attributes:\n")
        # Up to the next section.
        attributes = re.split(r"\n(?=\S)", section)[0]
        # "    name: meaning", and further lines, indented more.
        for name, lines in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE):
            text = " ".join(lines.split())
            # As a user types them: `null`, `true`.
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
    """The settings of one of `GROUPS`, without those that `model=` and `prompts=` set themselves."""
    chosen = ("name", "repository", "file") if group in ("model", "prompts") else ()
    return described(GROUPS[group], f"{group}.", chosen)


def command_settings(kind: type[RunSettings]) -> tuple[list[Setting], list[Setting]]:
    """The settings outside groups: those that every command has, in this one's words, and its own."""
    common = value_types(RunSettings)
    settings = described(kind)
    own = [setting for setting in settings if setting.name not in common]
    return [setting for setting in settings if setting.name in common], own


def method_settings(kind: type[DraftSettings]) -> list[Setting]:
    """The settings of a way to draft, without those that every draft or every model has."""
    return described(kind, "draft.", value_types(DraftSettings) | value_types(ModelSettings))


def engine_settings(kind: type[EngineSettings]) -> list[Setting]:
    """The settings of an engine."""
    return described(kind, "engine.", {"name"})


def sentence(summary: str) -> str:
    """A record's summary as a sentence."""
    return f"{capitalised(summary)}."
