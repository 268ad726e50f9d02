"""`--help` of a command, from its record, its settings and the configuration that was typed.

`harness latency --help` is a page, `--help all` is everything, and `--help WORD` is a section, or the entries with
the word.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hydra import compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.errors import SettingError, as_typed
from harness.config.machine import terminal_width
from harness.config.run import RunSettings
from harness.drafting.hybrid_method import SUMMARY as HYBRID_SUMMARY
from harness.drafting.registry import METHODS
from harness.engines.registry import ENGINES
from harness.menu import documentation, names
from harness.menu.documentation import Setting
from harness.menu.typed import meant
from harness.records.command import Command

_NAME_WIDTH = 28
_EXAMPLE_WIDTH = 44
# How many settings of a section the page shows.
_MOST_SETTINGS = 8
# Longer values are left out on the page, where a setting has one line.
_LONGEST_VALUE = 20
# The settings of all commands that the page shows.
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
# A name, what it means, and the value that it has, if it is a setting.
Entry = tuple[str, str, str]


def shown(command: Command, settings: Sequence[str], topic: str, presets: str | None) -> str:
    """The help of a command.

    Hydra's own `--help` looks through all presets twice.

    Args:
        settings: overrides that were typed, which the values follow.
        topic: a section, `all` of them, or a word that entries have; "" for the page.
        presets: a directory with the user's presets; None for none.

    Raises:
        SettingError: no section or entry has the word.
    """
    searched = create_config_search_path(str(names.CONF))
    if presets is not None:
        searched.prepend("command-line", f"file://{Path(presets).resolve()}", "schema")
    setbase("1.3")
    Hydra.create_main_hydra2("harness", searched)
    try:
        sections = _sections(command, compose(names.primary(command.name), list(settings)))
    finally:
        GlobalHydra.instance().clear()
    return _about(topic, command, sections) if topic else _page(command, sections, settings)


def _page(command: Command, sections: dict[str, list[Entry]], typed: Sequence[str]) -> str:
    """The help that most users need, in about forty lines, with the settings of a draft or engine that was typed."""
    width = terminal_width()
    parts = [textwrap.fill(documentation.sentence(command.summary), width), _examples(command)]
    parts.append(command.notes if "\n" in command.notes else textwrap.fill(command.notes, width))
    models = "a preset, with suffixes _8bit _4bit _NGPUs in any order, a directory, a GGUF file, a hub repository"
    choices = [("model=, draft=", models)]
    for topic in ("draft", "engine"):
        values = [name.partition("=")[2] for name, _, _ in sections[f"{topic}s"]]
        choices.append((f"{topic}=", ", ".join(values)))
    if "prompts" in sections:
        choices.append(("prompts=", "a benchmark (mt_bench, gsm8k, ...) or your own file"))
    parts.append("\n".join(_line(name, text) for name, text in choices))
    every = {entry[0]: entry for entries in sections.values() for entry in entries}
    only_here = vars(command.settings).get("__annotations__", {})
    # Settings that only this command has come first.
    of_command = sorted(sections.get(command.name, ()), key=lambda entry: entry[0] not in only_here)
    chosen = [entries for title, entries in sections.items() if title in typed]
    for entries in (of_command, *chosen, [every[name] for name in _USED_MOST]):
        lines = []
        for name, text, value in entries[:_MOST_SETTINGS]:
            # The first clause of a meaning, which goes on with semicolons and further sentences.
            clause = re.split("[;:.] ", text)[0]
            value = value if len(value) <= _LONGEST_VALUE else "[...]"
            space = width - _NAME_WIDTH - len(value) - 1
            lines.append(_line(name, textwrap.shorten(clause, space, placeholder="…"), value))
        if len(entries) > _MOST_SETTINGS:
            rest = f"{len(entries) - _MOST_SETTINGS} more: harness help {command.name} all"
            lines.append(_line("...", rest))
        parts.append("\n".join(lines))
    parts.append(
        textwrap.fill(
            "K=8 is decoding.num_draft_tokens=8, a name may be typed without its group where only "
            "one group has it, and --num-prompts 30 is num_prompts=30. -m sweeps over values with "
            "commas between them, --cfg job prints the configuration, -cd DIR adds presets. "
            f"harness help {command.name} all lists everything, and another word its section or "
            f"entries: {', '.join(sections)}, trees, ...",
            width,
            break_on_hyphens=False,
        )
    )
    return "\n\n".join(filter(None, parts))


def _about(topic: str, command: Command, sections: dict[str, list[Entry]]) -> str:
    """One section, all of them, or every entry with a word in its name or text.

    Raises:
        SettingError: no entry has it.
    """
    chosen: dict[str, list[Entry]] = sections
    if topic in sections:
        chosen = {topic: sections[topic]}
    elif topic != "all":
        settings = meant(topic, [name for entries in sections.values() for name, _, _ in entries])
        # The beginning of a word, so that `trees` is in `draft.tree` and in "of dynamic trees".
        beginning = re.compile(rf"\b{re.escape(topic.rstrip('s'))}", re.IGNORECASE)
        chosen = {}
        for title, entries in sections.items():
            for entry in entries:
                name, text, _ = entry
                if name in settings or (not settings and beginning.search(f"{name} {text}")):
                    chosen.setdefault(title, []).append(entry)
    if not chosen:
        rule = f"is not in the help of {command.name}; its sections: all, {', '.join(sections)}"
        raise SettingError(topic, rule)
    return "\n\n".join(
        "\n".join([title, *(_line(*entry) for entry in entries)])
        for title, entries in chosen.items()
    )


def _sections(command: Command, config: DictConfig) -> dict[str, list[Entry]]:
    """Everything that can be typed: presets, drafts, engines and settings, by the title of their section."""
    loader = GlobalHydra.instance().config_loader()
    groups = ["model", "decoding", "placement", "prompts", "+experiment", "+launcher", "+sweeper"]
    options = {group: loader.get_group_options(group.lstrip("+")) for group in groups}
    drafts = {name: record.summary for name, record in METHODS.all().items() if record.named}
    drafts = {"none": "the model alone", **drafts, "TEXT+OTHER": HYBRID_SUMMARY}
    engines = {name: record.summary for name, record in ENGINES.all().items()}
    sections: dict[str, list[Entry]] = {
        "presets": [
            (f"{group}=", " ".join(presets), "")
            for group, presets in options.items()
            if presets and (group != "prompts" or group in config)
        ],
        "drafts": [(f"draft={name}", summary, "") for name, summary in drafts.items()],
        "engines": [(f"engine={name}", summary, "") for name, summary in engines.items()],
    }
    kind = command.settings or RunSettings
    settings = {
        command.name: documentation.of_command(kind),
        "common": documentation.of_all_commands(kind),
    }
    settings |= {
        group: documentation.of_group(group) for group in documentation.GROUPS if group in config
    }
    if config.draft.name != "none":
        method = METHODS[str(config.draft.get("method", "model"))]
        settings[f"draft={config.draft.name}"] = documentation.of_method(method.settings)
    engine = ENGINES[str(config.engine.name)]
    settings[f"engine={config.engine.name}"] = documentation.of_engine(engine.settings)
    for topic, of_topic in settings.items():
        sections[topic] = [_described(setting, config) for setting in of_topic]
    return {topic: entries for topic, entries in sections.items() if entries}


def _described(setting: Setting, config: DictConfig) -> Entry:
    """A setting with its meaning, its choices and the value that it has now, which a preset may have changed."""
    text = setting.meaning.rstrip(".")
    words = [word for word in setting.choices if f"`{word}`" not in text]
    if words and set(words) != {"true", "false"}:
        text = f"{text} ({', '.join(setting.choices)})"
    try:
        value = OmegaConf.select(config, setting.name, default=setting.default)
    except OmegaConfBaseException:
        return setting.name, text, ""
    if OmegaConf.is_dict(value):
        return setting.name, text, "[...]"
    if OmegaConf.is_list(value):
        value = list(value)
    is_known = isinstance(value, str | int | float | list | tuple) or value is None
    return setting.name, text, f"[{as_typed(value)}]" if is_known else ""


def _examples(command: Command) -> str:
    """Command lines, each with its meaning beside it, or below it where it is long."""
    width = terminal_width()
    lines = []
    for arguments, meaning in command.examples:
        line = f"  harness {command.name} {arguments}".rstrip()
        beside = f"{line:{_EXAMPLE_WIDTH}}  {meaning}"
        if len(beside) <= width:
            lines.append(beside)
            continue
        typed = textwrap.wrap(line, width - 2, break_on_hyphens=False, subsequent_indent="      ")
        lines.append(" \\\n".join(["  " + typed[0].lstrip(), *typed[1:]]))
        lines.append(f"      {meaning}")
    return "\n".join(lines)


def _line(name: str, text: str, value: str = "") -> str:
    """A name, and a text beside it; below it where the name is long."""
    margin = " " * _NAME_WIDTH
    text = f"{text} {value}".rstrip()
    lines = textwrap.wrap(text, terminal_width() - _NAME_WIDTH, break_on_hyphens=False) or [""]
    first = f"  {name}"
    if len(first) >= _NAME_WIDTH:
        return "\n".join([first, *(margin + line for line in lines)])
    return "\n".join([first.ljust(_NAME_WIDTH) + lines[0], *(margin + line for line in lines[1:])])
