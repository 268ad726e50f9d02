"""The commands by name, and the check of a run's settings by the records of its engine, command and draft."""

from __future__ import annotations

from typing import Any

from harness.commands.command import Command, CommandRecord, ConfiguredCommand, PathCommand
from harness.config.methods import METHODS
from harness.config.registry import Registry, names_of_fields
from harness.config.run import RunSettings
from harness.engines.record import engine_of
from harness.results.row import Row


class Audit(PathCommand):
    """The record of `audit`, which explains published figures about speculative decoding, and checks whether they
    are consistent with each other.
    """

    name = "audit"
    summary = "an iteration's cost by published figures, and if they are possible: exit code 1 if not, 3 if unlikely"
    example = "baseline=22.7 speed=40.6 acceptance=73.9% K=3"
    program = "harness.commands.audit.command"


class Report(PathCommand):
    """The record of `report`, which shows what was measured, from its files."""

    name = "report"
    summary = "tables, Markdown and an HTML page with plots from the CSV files of what was measured"
    example = "results"
    program = "harness.commands.report.command"


_CONFIGURED = "latency acceptance compare eval recovery plan serve"
# In the order in which they are listed.
COMMANDS: Registry[CommandRecord] = Registry(
    "command",
    CommandRecord,
    {name: f"harness.commands.{name}.record:{name.capitalize()}" for name in _CONFIGURED.split()}
    | {"report": Report, "audit": Audit},
)


def commands() -> list[CommandRecord]:
    """All commands, in the order in which they are listed."""
    return [*COMMANDS.all().values()]


def with_settings() -> list[str]:
    """The names of the commands that take settings, in the order in which they are listed."""
    return [command.name for command in commands() if isinstance(command, ConfiguredCommand)]


def configured(name: str) -> ConfiguredCommand[Any]:
    """The command with this name, which must be one that takes settings."""
    command = COMMANDS[name]
    assert isinstance(command, ConfiguredCommand)
    return command


def whose_setting(name: str) -> str:
    """The rule for a setting, or a group of settings, that a command lacks: `is a setting of latency, recovery alone`.

    Empty if no command has the setting.
    """
    owners = [
        command.name
        for command in commands()
        if isinstance(command, ConfiguredCommand) and name in names_of_fields(command.settings)
    ]
    return f"is a setting of {', '.join(owners)} alone" if owners else ""


def measurement(name: str) -> Command[Any, Any]:
    """The command with this name, which must be one that writes rows."""
    command = COMMANDS[name]
    assert isinstance(command, Command)
    return command


def row_kinds() -> list[type[Row]]:
    """Every kind of row that a command writes."""
    kinds: list[type[Row]] = []
    for command in commands():
        if isinstance(command, Command):
            kinds += [command.row, *command.further_rows]
    return kinds


def checked(settings: RunSettings) -> RunSettings:
    """The settings, with the changes that the engine's record makes (`adapted`).

    Raises:
        SettingError: if the run breaks a rule of its engine, its command or its draft.
    """
    engine = engine_of(settings)
    settings = engine.adapted(settings)
    # The rules of the engine, of the command, and of the drafting method.
    engine.check(settings)
    settings.check_engine(engine)
    if settings.draft is not None:
        METHODS[settings.draft.method].check(settings)
    return settings
