"""The commands by name, and the rules that the records of a run have for it."""

from __future__ import annotations

from typing import Any

from harness.commands.command import Command, CommandRecord, ConfiguredCommand, PathCommand
from harness.config.methods import METHODS
from harness.config.registry import Registry, names_of_fields
from harness.config.run import RunSettings
from harness.engines.registry import engine_of
from harness.results.row import Row


class Audit(PathCommand):
    """Explains figures of a table, and checks them against each other."""

    name = "audit"
    summary = "what an iteration costs by published figures, and whether they are possible: exit code 0 yes, 1 no"
    example = "baseline=22.7 speed=40.6 acceptance=73.9% K=3"
    help_order = 11
    program = "harness.commands.audit.command"


class Report(PathCommand):
    """Reads the files of what was measured."""

    name = "report"
    summary = "tables, Markdown and an HTML page with plots from the CSV files of what was measured"
    example = "results"
    help_order = 8
    program = "harness.commands.report.command"


_OTHERS = "acceptance compare eval latency plan recovery serve"
COMMANDS: Registry[CommandRecord] = Registry(
    "command",
    CommandRecord,
    {"audit": Audit, "report": Report}
    | {name: f"harness.commands.{name}.record:{name.capitalize()}" for name in _OTHERS.split()},
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


def whose_setting(name: str) -> str:
    """`is a setting of latency, recovery alone`, of a setting or a group of them; empty where no command has it."""
    owners = [
        command
        for command in with_settings()
        if name in names_of_fields(configured(command).settings)
    ]
    return f"is a setting of {', '.join(owners)} alone" if owners else ""


def measurement(name: str) -> Command[Any, Any]:
    """The command of this name, which writes rows."""
    command = COMMANDS[name]
    assert isinstance(command, Command)
    return command


def row_kinds() -> list[type[Row]]:
    """Every kind of row that is written."""
    kinds: list[type[Row]] = []
    for command in commands():
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
