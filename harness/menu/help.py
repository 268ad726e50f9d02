"""`--help` of a command, from its record, its settings and the configuration that was typed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.errors import as_typed
from harness.config.run import RunSettings
from harness.drafting.hybrid_method import SUMMARY as HYBRID_SUMMARY
from harness.drafting.registry import METHODS
from harness.engines.registry import ENGINES
from harness.menu import documentation
from harness.menu.documentation import Setting
from harness.records.command import Command
from harness.records.registry import COMMANDS

_WIDTH = 80
_NAME_WIDTH = 26
_FOOTER = (
    "-m sweeps over comma-separated values, --cfg job prints the configuration, -cd DIR adds your "
    "own presets. draft=lookup --help, or another draft or engine, lists its settings."
)


def template(root: DictConfig) -> str:
    """The help of the command whose configuration this is; Hydra would fill in a word behind a `$`."""
    return help_of(COMMANDS[str(root.command)], root).replace("$", "$$")


def help_of(command: Command, config: DictConfig) -> str:
    """The help of a command: examples, presets, and each setting with its value."""
    kind = command.settings or RunSettings
    parts = [_wrapped(documentation.sentence(command.summary))]
    parts.append("\n".join(_examples(command)))
    if command.notes:
        parts.append(command.notes if "\n" in command.notes else _wrapped(command.notes))
    parts.append("Presets (group=name)\n" + "\n".join(_presets(config)))
    sections = [
        (command.name, documentation.of_command(kind)),
        ("Of all commands", documentation.of_all_commands(kind)),
        *((group, documentation.of_group(group)) for group in documentation.GROUPS),
        *_chosen(config),
    ]
    for title, settings in sections:
        group = settings[0].name.partition(".")[0] if settings else ""
        if settings and ("." not in settings[0].name or group in config):
            parts.append("\n".join([title, *(_line(setting, config) for setting in settings)]))
    parts.append(_wrapped(_FOOTER))
    return "\n\n".join(parts)


def _examples(command: Command) -> list[str]:
    lines = []
    for arguments, meaning in command.examples:
        line = f"python -m harness {command.name} {arguments}".rstrip()
        typed = textwrap.wrap(line, _WIDTH - 4, break_on_hyphens=False, subsequent_indent="    ")
        lines.append("  " + " \\\n  ".join(typed))
        lines.append(f"      {meaning}")
    return lines


def _chosen(config: DictConfig) -> list[tuple[str, list[Setting]]]:
    """The settings of the way to draft and of the engine that the configuration names."""
    draft = config.draft
    engine = config.engine
    method = METHODS[str(draft.get("method", "model"))]
    title = f"draft={draft.name}: {method.summary}"
    chosen = []
    if draft.name != "none":
        chosen.append((textwrap.fill(title, _WIDTH), documentation.of_method(method.settings)))
    record = ENGINES[str(engine.name)]
    title = f"engine={engine.name}: {record.summary}"
    chosen.append((textwrap.fill(title, _WIDTH), documentation.of_engine(record.settings)))
    return chosen


def _presets(config: DictConfig) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    models = loader.get_group_options("model")
    lines = [
        "  model=, draft=  a preset, with suffixes _8bit _4bit _NGPUs in any order, a",
        "                  directory, a GGUF file or a hub repository",
    ]
    for family in _families(models):
        lines.append(
            textwrap.fill(
                " ".join(family),
                _WIDTH,
                initial_indent="    ",
                subsequent_indent="      ",
                break_on_hyphens=False,
            )
        )
    lines.append("  draft=")
    lines.append(_entry("none", "the model alone"))
    for name, method in METHODS.all().items():
        if method.named:
            lines.append(_entry(name, method.summary))
    lines.append(_entry("TEXT+OTHER", HYBRID_SUMMARY))
    lines.append("  engine=")
    lines += [_entry(name, engine.summary) for name, engine in ENGINES.all().items()]
    groups = ["decoding", "placement", *(["prompts"] if "prompts" in config else [])]
    groups += ["+experiment", "+launcher", "+sweeper"]
    for group in groups:
        options = loader.get_group_options(group.lstrip("+"))
        if options:
            lines.append(_entry(f"{group}=", " ".join(options), indent="  "))
    return lines


def _families(names: Iterable[str]) -> list[list[str]]:
    """Presets by the words that they begin with."""
    families: dict[str, list[str]] = {}
    for name in names:
        # Sizes alone, `7B`, are one family.
        family = re.match(r"([A-Za-z]+[\d.]*)?", name)
        assert family is not None
        families.setdefault(family[0], []).append(name)
    return list(families.values())


def _line(setting: Setting, config: DictConfig) -> str:
    """A setting with its meaning, its choices and the value that it has now."""
    text = setting.meaning.rstrip(".")
    words = [word for word in setting.choices if f"`{word}`" not in text]
    if words and set(words) != {"true", "false"}:
        text = f"{text} ({', '.join(setting.choices)})"
    value = _value(setting, config)
    return _entry(setting.name, f"{text} [{value}]" if value else text, indent="  ")


def _value(setting: Setting, config: DictConfig) -> str:
    """The value of a setting, which a preset may have changed."""
    try:
        value = OmegaConf.select(config, setting.name, default=setting.default)
    except OmegaConfBaseException:
        return ""
    if OmegaConf.is_dict(value):
        return "..."
    if OmegaConf.is_list(value):
        value = list(value)
    known = isinstance(value, str | int | float | list | tuple) or value is None
    return as_typed(value) if known else ""


def _entry(name: str, text: str, indent: str = "    ") -> str:
    """A name, and a text beside it; below it where the name is long."""
    margin = " " * _NAME_WIDTH
    lines = textwrap.wrap(text, _WIDTH - _NAME_WIDTH, break_on_hyphens=False) or [""]
    first = f"{indent}{name}"
    if len(first) >= _NAME_WIDTH:
        return "\n".join([first, *(margin + line for line in lines)])
    return "\n".join([first.ljust(_NAME_WIDTH) + lines[0], *(margin + line for line in lines[1:])])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH)
