"""`--help` of a command, from its record, its settings and the configuration that was typed.

`harness latency --help` is a page, `--help all` is everything, and `--help presets` the names alone.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cli import hydra_app
from harness.cli.menu import documentation, names
from harness.cli.menu.columns import columns_by_topic
from harness.cli.menu.documentation import Setting
from harness.commands.command import ConfiguredCommand
from harness.config.errors import SettingError, as_typed
from harness.config.machine import terminal_width
from harness.config.methods import METHODS
from harness.engines.registry import ENGINES

_NAME_WIDTH = 28
_EXAMPLE_WIDTH = 44
# How many settings of a section the page shows.
_MOST_SETTINGS = 8
# Longer values are dots on the page.
_LONGEST_VALUE = 20
# Of the settings that every command has, those that the page shows.
_USED_MOST = (
    "decoding.num_draft_tokens",
    "decoding.temperature",
    "decoding.max_new_tokens",
    "decoding.rule",
    "batch_size",
    "seed",
    "dtype",
    "runner",
)


def command_help(
    command: ConfiguredCommand[Any], overrides: Sequence[str], topic: str, presets: str | None
) -> str:
    """The help of a command. Hydra's own `--help` is slower: it looks through all presets twice.

    Args:
        overrides: typed settings; the help shows values as they are with these.
        topic: `all` or `presets`; "" for the page.
        presets: a directory with the user's presets; None for none.

    Raises:
        SettingError: there is no such topic.
    """
    with hydra_app.composed(names.CONF, command.name, overrides, presets) as (config, loader):
        sections = _sections(command, config, loader)
    if not topic:
        return _page(command, sections, overrides)
    if topic not in ("all", "presets"):
        raise SettingError(topic, f"is not in the help of {command.name}, which has: all, presets")
    chosen = sections if topic == "all" else {topic: sections[topic]}
    parts = []
    for title, entries in chosen.items():
        lines = [_line(entry.name, entry.meaning, _in_brackets(entry.value)) for entry in entries]
        parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)


def columns_help() -> str:
    """Every column of the CSV files, with its unit and the files that have it."""
    about = (
        "One row is one arm of one run. In brackets are the files that have the column, without .csv. Behind a name, ± "
        "says that the figure has an interval, in further columns: speedup_low, speedup_high, speedup_covers."
    )
    parts = [textwrap.fill(about, terminal_width())]
    for topic, columns in columns_by_topic().items():
        lines = [topic]
        for column, files in columns.items():
            meaning = f"{column.meaning}, {column.unit}" if column.unit else column.meaning
            lines.append(_line(column.name, meaning, f"[{', '.join(files)}]"))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _sections(
    command: ConfiguredCommand[Any], config: DictConfig, loader: ConfigLoader
) -> dict[str, list[Setting]]:
    """Everything that can be typed: presets, drafts, engines and settings, by the title of their section.

    Settings have the values that the composed configuration gives them, and their choices in the meaning.
    """
    presets = []
    # Groups with a plus have no default in any command: the plus is typed.
    for group in "model decoding placement prompts +experiment +launcher".split():
        options = loader.get_group_options(group.lstrip("+"))
        if options and (group.startswith("+") or group in config):
            presets.append(Setting(f"{group}=", " ".join(options)))
    drafts = {
        name: "the model alone" if name == "none" else METHODS[name].summary
        for name in names.drafts()
    }
    engines = {name: record.summary for name, record in ENGINES.all().items()}
    sections = {
        "presets": presets,
        "drafts": [Setting(f"draft={name}", summary) for name, summary in drafts.items()],
        "engines": [Setting(f"engine={name}", summary) for name, summary in engines.items()],
    }
    common, own = documentation.command_settings(command.settings)
    settings = {command.name: own, "common": common}
    for group in documentation.GROUPS:
        if group in config:
            settings[group] = documentation.group_settings(group)
    if config.draft.name != "none":
        method = METHODS[str(config.draft.get("method", "model"))]
        settings[f"draft={config.draft.name}"] = documentation.method_settings(method.settings)
    engine = ENGINES[str(config.engine.name)]
    settings[f"engine={config.engine.name}"] = documentation.engine_settings(engine.settings)
    for title, described in settings.items():
        sections[title] = [_configured(setting, config) for setting in described]
    return {title: entries for title, entries in sections.items() if entries}


def _configured(setting: Setting, config: DictConfig) -> Setting:
    """A setting with the value that it has now, which a preset may have changed, and its choices in the meaning."""
    meaning = setting.meaning.rstrip(".")
    unexplained = {word for word in setting.choices if f"`{word}`" not in meaning}
    if unexplained and unexplained != {"true", "false"}:
        meaning = f"{meaning} ({', '.join(setting.choices)})"
    try:
        value = OmegaConf.select(config, setting.name, default=setting.value)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:  # an interpolation of what is not there
        value = MISSING
    return setting._replace(meaning=meaning, value=value)


def _in_brackets(value: Any) -> str:
    """A value in brackets; nothing for one that is MISSING, and dots for a mapping."""
    if value is MISSING:
        return ""
    return "[...]" if isinstance(value, dict) else f"[{as_typed(value)}]"


def _page(
    command: ConfiguredCommand[Any], sections: dict[str, list[Setting]], overrides: Sequence[str]
) -> str:
    """The help that most users need, in about fifty lines, with the settings of a draft or engine that was typed."""
    width = terminal_width()
    parts = [textwrap.fill(documentation.sentence(command.summary), width), _examples(command)]
    parts.append(command.notes if "\n" in command.notes else textwrap.fill(command.notes, width))
    models = "a preset, with suffixes _8bit _4bit _NGPUs in any order, a directory, a GGUF file, a hub repository"
    choices = [("model=, draft=", models)]
    for group in ("draft", "engine"):
        values = [entry.name.partition("=")[2] for entry in sections[f"{group}s"]]
        choices.append((f"{group}=", ", ".join(values)))
    if "prompts" in sections:
        choices.append(("prompts=", "a benchmark (mt_bench, gsm8k, ...) or your own file"))
    parts.append("\n".join(_line(name, text) for name, text in choices))
    # Settings that this command's class adds come before those of a class that it extends.
    added = inspect.get_annotations(command.settings)
    own_settings = sorted(sections.get(command.name, ()), key=lambda entry: entry.name not in added)
    # Of a draft or an engine that was typed: `draft=lookup` is a title.
    chosen_sections = [entries for title, entries in sections.items() if title in overrides]
    by_name = {entry.name: entry for entries in sections.values() for entry in entries}
    used_most = [by_name[name] for name in _USED_MOST]
    for entries in (own_settings, *chosen_sections, used_most):
        lines = []
        for entry in entries[:_MOST_SETTINGS]:
            # The first clause of a meaning, which goes on with semicolons and further sentences.
            clause = re.split("[;:.] ", entry.meaning)[0]
            value = _in_brackets(entry.value)
            value = value if len(value) <= _LONGEST_VALUE else "[...]"
            lines.append(_line(entry.name, clause, value))
        if len(entries) > _MOST_SETTINGS:
            rest = f"{len(entries) - _MOST_SETTINGS} more: harness help {command.name} all"
            lines.append(_line("...", rest))
        parts.append("\n".join(lines))
    parts.append(
        textwrap.fill(
            "K=8 is decoding.num_draft_tokens=8, and a name may be typed without its group where only one "
            "group has it. -m sweeps over values with commas between them, --cfg job prints the "
            "configuration, -cd DIR adds presets. "
            f"harness help {command.name} all lists everything, harness help presets names alone, "
            "harness help columns what the CSV files hold.",
            width,
            break_on_hyphens=False,
        )
    )
    return "\n\n".join(filter(None, parts))


def _examples(command: ConfiguredCommand[Any]) -> str:
    """Command lines, each with its meaning beside it, or below it where it is long."""
    width = terminal_width()
    lines = []
    for arguments, meaning in command.examples:
        line = f"  harness {command.name} {arguments}".rstrip()
        joined = f"{line:{_EXAMPLE_WIDTH}}  {meaning}"
        if len(joined) <= width:
            lines.append(joined)
            continue
        wrapped = textwrap.wrap(line, width - 2, break_on_hyphens=False, subsequent_indent="      ")
        lines.append(" \\\n".join(wrapped))
        lines.append(f"      {meaning}")
    return "\n".join(lines)


def _line(name: str, text: str, value: str = "") -> str:
    """A name with a text and a value beside it; below it where the name is long."""
    margin = " " * _NAME_WIDTH
    block = textwrap.fill(
        f"{text} {value}",
        terminal_width(),
        initial_indent=margin,
        subsequent_indent=margin,
        break_on_hyphens=False,
    )
    name = f"  {name}"
    if len(name) < _NAME_WIDTH:
        return f"{name:{_NAME_WIDTH}}{block.lstrip()}"
    return f"{name}\n{block}"
