"""The commands by name, and the rules that the records of a run have for it."""

from __future__ import annotations

from typing import Any

from harness.commands.command import Command, CommandRecord, ConfiguredCommand
from harness.config.methods import METHODS
from harness.config.registry import Registry
from harness.config.run import RunSettings
from harness.engines.registry import engine_of
from harness.results.row import Row

_READING = "audit report"
_OTHERS = "acceptance compare eval latency plan recovery serve"
COMMANDS: Registry[CommandRecord] = Registry(
    "command",
    CommandRecord,
    {name: f"harness.commands.path_commands:{name.capitalize()}" for name in _READING.split()}
    | {name: f"harness.commands.{name}.record:{name.capitalize()}" for name in _OTHERS.split()},
    advice="; Command there is one that measures",
)


def commands() -> list[CommandRecord]:
    """Every command, in the order in which they are listed."""
    return sorted(COMMANDS.all().values(), key=lambda command: command.help_order)


def with_settings() -> list[str]:
    """The names of the commands that take settings, and not paths."""
    return [command.name for command in commands() if isinstance(command, ConfiguredCommand)]


def configured(name: str) -> ConfiguredCommand[Any]:
    """The command of this name, which takes settings."""
    command = COMMANDS[name]
    assert isinstance(command, ConfiguredCommand)
    return command


def measurement(name: str) -> Command[Any, Any]:
    """The command of this name, which writes rows."""
    command = COMMANDS[name]
    assert isinstance(command, Command)
    return command


def row_kinds() -> list[type[Row]]:
    """Every kind of row that is written."""
    kinds: list[type[Row]] = []
    built_in = COMMANDS.all().values()
    for command in sorted(built_in, key=lambda command: command.help_order):
        if isinstance(command, Command):
            kinds += [command.row, *command.further_rows]
    return kinds


def checked(settings: RunSettings) -> RunSettings:
    """The settings, with what their records imply.

    Raises:
        SettingError: the run breaks a rule of what it names.
    """
    engine = engine_of(settings)
    settings = engine.adapted(settings)
    engine.check(settings)
    settings.check_engine(engine)
    if settings.draft is not None:
        METHODS[settings.draft.method].check(settings)
    return settings
