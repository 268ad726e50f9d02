"""Writes the texts that `harness help` prints, in `harness/cli/texts`: `python -m recipes.help_texts`.

The texts of `report` and `audit`, which have no settings of a run, are written by hand.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cli import names
from harness.cli.composing import compose, opened
from harness.cli.conversion import fixed_groups
from harness.cli.help import TEXTS
from harness.cli.typed import Typed
from harness.commands.command import ConfiguredCommand
from harness.commands.registry import commands, configured, with_settings
from harness.config.errors import as_typed
from harness.config.methods import METHODS
from harness.engines.record import ENGINES
from recipes.described import (
    Setting,
    columns_by_topic,
    command_settings,
    engine_settings,
    group_settings,
    method_settings,
    sentence,
)

_WIDTH = 80
_NAME_WIDTH = 28
_EXAMPLE_WIDTH = 44
# The page of a command shows this many settings of a section.
_MOST_SETTINGS = 8
# A longer value is replaced by dots on the page.
_LONGEST_VALUE = 20
# The settings of all commands that a command's page shows.
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

_BEGIN = """\
To begin, harness latency measures a tiny pair that comes with it: no GPU, no
download, half a minute. harness latency -- llama-server ... measures your server.
harness COMMAND --help shows a command's settings."""

# The sections of a command's help, by title.
Sections = dict[str, list[Setting]]


def help_texts() -> dict[str, str]:
    """Every text, by the name of its file."""
    texts = {"commands": _commands(), "columns": _columns()}
    with opened() as hydra:
        for command in map(configured, with_settings()):
            config = compose(hydra, command.name, Typed([], {}))
            sections = _sections(command, config, hydra)
            texts[command.name] = _page(command, sections)
            presets = {"presets": sections.pop("presets")}
            texts[f"{command.name}_all"] = _everything(sections)
            if command.name == with_settings()[0]:
                texts["presets"] = _everything(presets)
    return {f"{name}.txt": f"{text}\n" for name, text in texts.items()}


def _commands() -> str:
    """The list of commands."""
    margin = max(len(command.name) for command in commands()) + 4
    lines = [
        "Measure whether speculative decoding pays for a pair of language models.",
        "",
        "usage: harness COMMAND [setting=value ...] [-m] [-- SERVER COMMAND]",
        "",
    ]
    for command in commands():
        summary = f"  {command.name}".ljust(margin) + command.summary
        lines += textwrap.wrap(summary, _WIDTH, subsequent_indent=" " * margin)
        lines.append(f"{' ' * margin}harness {command.name} {command.example}")
    return "\n".join([*lines, "", _BEGIN])


def _columns() -> str:
    """Every column of the CSV files, with its unit and the files that have it."""
    about = (
        "One row is one arm of one run. In brackets are the files that have the column, without .csv. Behind a name, ± "
        "says that the figure has an interval, in further columns: speedup_low, speedup_high, speedup_covers."
    )
    parts = [_filled(about)]
    for topic, columns in columns_by_topic().items():
        lines = [topic]
        for column, files in columns.items():
            meaning = f"{column.meaning}, {column.unit}" if column.unit else column.meaning
            lines.append(_line(column.name, f"{meaning} [{', '.join(files)}]"))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _sections(command: ConfiguredCommand[Any], config: DictConfig, hydra: Hydra) -> Sections:
    """Everything that can be typed: presets, drafts, engines and settings, by section."""
    presets = []
    # Groups with a plus have no default in any command. Users must type the plus, too.
    for group in "model decoding placement prompts +experiment +pair +launcher".split():
        options = hydra.config_loader.get_group_options(group.lstrip("+"))
        if options and (group.startswith("+") or group in config):
            presets.append(Setting(f"{group}=", " ".join(options)))
    drafts = {name: METHODS[name].summary for name in names.drafts() if name != "none"}
    engines = {name: record.summary for name, record in ENGINES.all().items()}
    sections = {"presets": presets}
    chosen = {"draft": {"none": "the model alone"} | drafts, "engine": engines}
    for group, choices in chosen.items():
        sections[f"{group}s"] = [Setting(f"{group}={name}", text) for name, text in choices.items()]
    common, own = command_settings(command.settings)
    settings = {command.name: own, "common": common}
    settings |= {group: group_settings(group) for group in sorted(fixed_groups(command.settings))}
    for name, method in METHODS.all().items():
        # `model` is not a value of `draft=`.
        settings[f"draft={name}" if method.named else name] = method_settings(method.settings)
    for name, engine in ENGINES.all().items():
        settings[f"engine={name}"] = engine_settings(engine.settings)
    for title, described in settings.items():
        sections.setdefault(title, []).extend(_configured(setting, config) for setting in described)
    return {title: entries for title, entries in sections.items() if entries}


def _configured(setting: Setting, config: DictConfig) -> Setting:
    """A setting with its default for this command. Choices that the meaning does not explain are added to it."""
    meaning = setting.meaning.rstrip(".")
    unexplained = {word for word in setting.choices if f"`{word}`" not in meaning}
    if unexplained and unexplained != {"true", "false"}:
        meaning = f"{meaning} ({', '.join(setting.choices)})"
    try:
        value = OmegaConf.select(config, setting.name, default=setting.value)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:  # an interpolation of a value that does not exist
        value = dataclasses.MISSING
    return setting._replace(meaning=meaning, value=value)


def _everything(sections: Sections) -> str:
    parts = ["\n".join([title, *map(_entry, entries)]) for title, entries in sections.items()]
    return "\n\n".join(parts)


def _page(command: ConfiguredCommand[Any], sections: Sections) -> str:
    """The help page of a command, `--help`, in about fifty lines."""
    models = "a preset, with suffixes _8bit _4bit _NGPUs in any order, a directory, a GGUF file, a hub repository"
    choices = [Setting("model=, draft=", models)]
    for group in ("draft", "engine"):
        values = [entry.name.partition("=")[2] for entry in sections[f"{group}s"]]
        choices.append(Setting(f"{group}=", ", ".join(values)))
    if "prompts" in sections:
        choices.append(Setting("prompts=", "a benchmark (mt_bench, gsm8k, ...) or your own file"))
    # Settings of the command's own class come before those of its base classes.
    added = inspect.get_annotations(command.settings)
    own = sorted(sections.get(command.name, ()), key=lambda entry: entry.name not in added)
    by_name = {entry.name: entry for entries in sections.values() for entry in entries}
    blocks = ["\n".join(map(_entry, choices))]
    for entries in (own, [by_name[name] for name in _USED_MOST]):
        lines = [_entry(entry, in_short=True) for entry in entries[:_MOST_SETTINGS]]
        if (num_more := len(entries) - _MOST_SETTINGS) > 0:
            lines.append(_line("...", f"{num_more} more: harness help {command.name} all"))
        blocks.append("\n".join(lines))
    end = (
        "K=8 is decoding.num_draft_tokens=8, and a name may be typed without its group where only one group has it. "
        "-m sweeps over values with commas between them, --cfg job prints the configuration, -cd DIR adds presets. "
        f"harness help {command.name} all lists all settings, harness help presets names, harness help columns "
        "what the CSV files hold."
    )
    notes = command.notes if "\n" in command.notes else _filled(command.notes)
    parts = [_filled(sentence(command.summary)), _examples(command), notes, *blocks, _filled(end)]
    return "\n\n".join(filter(None, parts))


def _examples(command: ConfiguredCommand[Any]) -> str:
    """Example command lines, each with its meaning at its right, or below it if the line is long."""
    lines = []
    for arguments, meaning in command.examples:
        line = f"  harness {command.name} {arguments}".rstrip()
        joined = f"{line:{_EXAMPLE_WIDTH}}  {meaning}"
        if len(joined) <= _WIDTH:
            lines.append(joined)
            continue
        wrapped = textwrap.wrap(
            line, _WIDTH - 2, break_on_hyphens=False, subsequent_indent="      "
        )
        lines += [" \\\n".join(wrapped), f"      {meaning}"]
    return "\n".join(lines)


def _entry(entry: Setting, *, in_short: bool = False) -> str:
    """A line with a name, its meaning and its value.

    Args:
        in_short: show only the first clause of the meaning, up to a semicolon, colon or full stop, and replace a long
            value by dots.
    """
    meaning = re.split("[;:.] ", entry.meaning)[0] if in_short else entry.meaning
    value = ""
    if entry.value is not dataclasses.MISSING:
        value = "[...]" if isinstance(entry.value, dict) else f"[{as_typed(entry.value)}]"
        if in_short and len(value) > _LONGEST_VALUE:
            value = "[...]"
    return _line(entry.name, f"{meaning} {value}")


def _line(name: str, text: str) -> str:
    """A name with a text at its right, or below it if the name is long."""
    block = _filled(text, " " * _NAME_WIDTH)
    name = f"  {name}"
    if len(name) < _NAME_WIDTH:
        return f"{name:{_NAME_WIDTH}}{block.lstrip()}"
    return f"{name}\n{block}"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def main() -> None:
    for name, text in help_texts().items():
        (TEXTS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
