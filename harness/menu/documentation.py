"""Settings as their own classes describe them: `docs/settings.md`, and what `--help` is made of."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from harness.config.engines import EngineSettings
from harness.config.errors import as_typed
from harness.config.run import RunSettings
from harness.config.settings import (
    DecodingSettings,
    DraftSettings,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
    ResultSettings,
)
from harness.drafting.hybrid_method import SUMMARY as HYBRID_SUMMARY
from harness.drafting.hybrid_method import HybridSettings
from harness.drafting.registry import METHODS
from harness.engines.registry import ENGINES
from harness.menu import names
from harness.menu.conversion import plain_settings
from harness.records.registry import COMMANDS, commands

# The groups of settings that every command has, apart from drafts and engines.
GROUPS: dict[str, type] = {
    "decoding": DecodingSettings,
    "model": ModelSettings,
    "placement": PlacementSettings,
    "prompts": PromptSettings,
    "results": ResultSettings,
}


class Setting(NamedTuple):
    """One setting.

    Attributes:
        name: as it is typed, `decoding.top_p`.
        choices: the words that it takes; none for numbers, texts and lists.
        default: what it is where nothing is typed; MISSING where it must be set or follows from a preset.
        meaning: half a line or more.
    """

    name: str
    choices: tuple[str, ...]
    default: Any
    meaning: str


def meanings(kind: type) -> dict[str, str]:
    """The meanings of a dataclass's fields, from the `Attributes:` of its docstring and of its bases'."""
    found: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(ancestor):
            continue
        _, _, section = inspect.cleandoc(ancestor.__doc__ or "").partition("Attributes:\n")
        # Up to the next section.
        attributes = re.split(r"\n(?=\S)", section)[0]
        for name, lines in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE):
            text = " ".join(lines.split())
            for value in (None, True, False):
                text = re.sub(rf"\b{value}\b", as_typed(value), text)
            found[name] = text
    return found


def described(kind: type, fields: Iterable[str], prefix: str = "") -> list[Setting]:
    """Some fields of a dataclass as settings."""
    about = meanings(kind)
    hints = typing.get_type_hints(kind)
    metadata = {field.name: field.metadata for field in dataclasses.fields(kind)}
    settings = []
    for name in fields:
        default = getattr(kind, name, dataclasses.MISSING)
        # The names of a registry, where a setting takes one of them.
        names = metadata[name].get("choices")
        choices = tuple(names()) if names else _choices(hints[name])
        settings.append(Setting(prefix + name, choices, default, about.get(name, "")))
    return settings


def _choices(hint: Any) -> tuple[str, ...]:
    """The words that a value may be."""
    if hint is bool:
        return ("true", "false")
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    return tuple(word for part in typing.get_args(hint) for word in _choices(part))


def of_group(group: str) -> list[Setting]:
    """The settings of a group that every command has."""
    kind = GROUPS[group]
    # What `model=` and `prompts=` set by themselves.
    chosen = ("name", "repository", "file") if group in ("model", "prompts") else ()
    fields = [field.name for field in dataclasses.fields(kind) if field.name not in chosen]
    return described(kind, fields, f"{group}.")


def of_command(kind: type[RunSettings]) -> list[Setting]:
    """The settings that only this command has."""
    common = plain_settings(RunSettings)
    return described(kind, [name for name in plain_settings(kind) if name not in common])


def of_all_commands(kind: type[RunSettings] = RunSettings) -> list[Setting]:
    """The settings outside groups that every command has.

    Args:
        kind: of one command, which may describe them in words of its own: `batch_size` of `serve`.
    """
    return described(kind, plain_settings(RunSettings))


def of_method(kind: type[DraftSettings]) -> list[Setting]:
    """The settings of a way to draft, without those that every model has."""
    common = {field.name for field in dataclasses.fields(DraftSettings)}
    return described(kind, [name for name in kind.setting_names() if name not in common], "draft.")


def of_engine(kind: type[EngineSettings]) -> list[Setting]:
    """The settings of an engine."""
    return described(kind, [name for name in kind.setting_names() if name != "name"], "engine.")


def departures(command: str) -> Mapping[str, Any]:
    """The defaults that a command's file in `conf/` gives to settings of all commands, by name."""
    config = names.written(command)
    found = {}
    groups = [("", of_all_commands())] + [(group, of_group(group)) for group in GROUPS]
    for group, settings in groups:
        given = config.get(group, {}) if group else config
        for setting in settings:
            last = setting.name.rpartition(".")[2]
            if last in given and given[last] != setting.default:
                found[setting.name] = given[last]
    return found


def sentence(summary: str) -> str:
    """A record's summary as a sentence."""
    return f"{summary[:1].upper()}{summary[1:]}."


def document() -> str:
    """`docs/settings.md`, without the records of installed packages."""
    parts = [
        "# Settings",
        "Generated by `python -m harness.menu.documentation > docs/settings.md`; "
        "`harness help COMMAND all` shows the same.",
        "## Of all commands",
        _table(of_all_commands()),
    ]
    for group in GROUPS:
        first_line = (GROUPS[group].__doc__ or "").partition("\n")[0]
        parts += [f"### {group}", first_line, _table(of_group(group))]
    for command in commands():
        if command.settings is None or not COMMANDS.is_built_in(command.name):
            continue
        parts += [f"## {command.name}", sentence(command.summary)]
        own = of_command(command.settings)
        if own:
            parts.append(_table(own))
        other = departures(command.name)
        if other:
            listed = ", ".join(f"`{name}={as_typed(value)}`" for name, value in other.items())
            parts.append(f"Other defaults here: {listed}.")
    parts.append("## What drafts")
    for name, method in METHODS.built_in().items():
        # `model` and `new_head` are no names to type.
        title = f"draft={name}" if method.named else name
        parts += [f"### {title}", sentence(method.summary)]
        if own := of_method(method.settings):
            parts.append(_table(own))
    parts += ["### draft=TEXT+OTHER", sentence(HYBRID_SUMMARY)]
    parts.append(_table(of_method(HybridSettings)))
    parts.append("## Engines")
    for name, engine in ENGINES.built_in().items():
        parts += [f"### engine={name}", sentence(engine.summary)]
        parts.append(_table(of_engine(engine.settings)))
    return "\n\n".join(parts) + "\n"


def _table(settings: Iterable[Setting]) -> str:
    lines = ["| setting | default | choices | |", "|---|---|---|---|"]
    for setting in settings:
        default = "" if setting.default is dataclasses.MISSING else as_typed(setting.default)
        cells = [
            f"`{setting.name}`",
            f"`{default}`" if default else "",
            " ".join(f"`{choice}`" for choice in setting.choices),
            setting.meaning.replace("|", "\\|"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(document(), end="")
