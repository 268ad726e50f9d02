"""The registries of what a user can name, and the rules that their records have for a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from harness.config.errors import SettingError
from harness.config.run import RunSettings
from harness.config.settings import DraftSettings, require
from harness.menu.command import Command
from harness.menu.engine import EngineRecord
from harness.menu.head_kind import HeadKind
from harness.menu.hybrid import HybridSettings, hybrid
from harness.menu.method import Method, TextMethod
from harness.menu.registry import Registry
from harness.menu.trees import check_trees

Chosen = TypeVar("Chosen", Method, EngineRecord)

HEADS: Registry[HeadKind] = Registry("draft", HeadKind, "harness.drafting.kinds", "harness.heads")


class SettingsRegistry(Registry[Chosen]):
    """Records of which each has settings of its own: only `lookup` has `draft.max_ngram`.

    A group of a run's configuration, `draft` or `engine`, names one record and has its settings.

    Attributes:
        key: the setting of the group that names the record, `draft.method` or `engine.name`.
        default: the record of a group without that setting.
    """

    key: ClassVar[str]
    default: ClassVar[str]

    def settings_class(self, config: Mapping[str, Any]) -> Any:
        """The class of the settings that a group's configuration is for."""
        return self[str(config.get(self.key, self.default))].settings

    def owners(self, setting: str) -> list[str]:
        """The names of the records with a setting, among those that need no file."""
        records = self.all().items()
        return [name for name, record in records if setting in record.settings.setting_names()]

    def setting_names(self) -> list[str]:
        """Every setting of the records that need no file, each once."""
        kinds = [record.settings for record in self.all().values()]
        return list(dict.fromkeys(name for kind in kinds for name in kind.setting_names()))

    def without_others(self, config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """A group's configuration without settings that only other records of a sweep have.

        `-m draft=lookup,suffix draft.max_ngram=2` sets `max_ngram` in both jobs; the job of
        `suffix` is to go without. What no record of the sweep has stays, and is refused later.

        Args:
            names: the records of the sweep.
        """
        own = self.settings_class(config).setting_names()
        others = {setting for name in names for setting in self[name].settings.setting_names()}
        return {key: value for key, value in config.items() if key in own or key not in others}


class Engines(SettingsRegistry[EngineRecord]):
    key = "name"
    default = "local"


class Methods(SettingsRegistry[Method]):
    """Ways to draft, and hybrids of two of them, `suffix+model`."""

    key = "method"
    default = "model"

    def owners(self, setting: str) -> list[str]:
        return ["hybrids"] if setting in HybridSettings.own_names() else super().owners(setting)

    def setting_names(self) -> list[str]:
        return [*super().setting_names(), *HybridSettings.own_names()]

    def is_built_in(self, name: str) -> bool:
        """Whether the method, or each part of a hybrid, belongs to this project."""
        parts = self.split(name) or [name]
        return all(super(Methods, self).is_built_in(part) for part in parts)

    def source(self, name: str) -> bytes | None:
        """The code of a method that is not built in, or of such parts of a hybrid."""
        parts = self.split(name) or [name]
        sources = [super(Methods, self).source(part) for part in parts]
        known = [source for source in sources if source is not None]
        return b"".join(known) if known else None

    def split(self, name: str) -> tuple[str, str] | None:
        """The text method and the other part in the name of a hybrid; None for any other name.

        The name of a draft, `suffix+tiny_eagle3`, or of its method, `suffix+model`. A plus divides
        only behind the name of a text method: the one in `./a+b.py:MyMethod` does not.
        """
        for plus in re.finditer(r"\+", name):
            text, other = name[: plus.start()], name[plus.end() :]
            is_known = text in self.names() or self.is_in_file(text)
            if is_known and other:
                return (text, other) if isinstance(self[text], TextMethod) else None
        return None

    def _load(self, name: str) -> Method:
        parts = self.split(name)
        if parts is None:
            return super()._load(name)
        text, other = parts
        return hybrid(name, self[text], self[other])


METHODS = Methods(
    "draft",
    Method,
    "harness.menu.methods",
    "harness.methods",
    advice=" or TextMethod: docs/your-own-method.md",
)
COMMANDS: Registry[Command] = Registry(
    "command", Command, "harness.menu.commands", "harness.commands"
)
ENGINES = Engines("engine", EngineRecord, "harness.menu.engines", "harness.engines")


def commands() -> list[Command]:
    """Every command that needs no file, in the order in which they are listed."""
    return sorted(COMMANDS.all().values(), key=lambda command: command.help_order)


def with_settings() -> list[str]:
    """The names of the commands that take settings, and not paths."""
    return [command.name for command in commands() if command.settings is not None]


def settings_of(command: Command) -> type[RunSettings]:
    """The class of the settings of a command that has some."""
    assert command.settings is not None
    return command.settings


def method_of(draft: DraftSettings) -> Method:
    """The way to draft that the settings are for."""
    return METHODS[draft.method]


def engine_of(settings: RunSettings) -> EngineRecord:
    """The engine of a run."""
    return ENGINES[settings.engine.name]


def is_elsewhere(engine: str | None) -> bool:
    """Whether an engine of this name, of a row, computes on another machine.

    A name in a row runs no code: engines in files of the user's are not looked up.
    """
    if engine is None or engine not in ENGINES.names():
        return False
    return not ENGINES[engine].computes_here


def default_draft(engine: str) -> str | None:
    """The draft of an engine where the user names none; None where the model's preset decides.

    None also for an engine that does not exist, which is reported later.
    """
    try:
        return ENGINES[engine].default_draft
    except SettingError:
        return None


def pair_of(settings: RunSettings) -> tuple[object, ...]:
    """The identity of the models and engine that a process holds for a run. Runs with the same
    value can share them.
    """
    engine = engine_of(settings)
    return *settings.pair_identity, engine.loads_pair, engine.computes_here, engine.may_crash


def checked(settings: RunSettings) -> RunSettings:
    """The settings, with what their records imply.

    Raises:
        SettingError: the run breaks a rule of what it names.
    """
    engine = engine_of(settings)
    settings = engine.adapted(settings)
    engine.check(settings)
    settings.check_engine(engine)
    check_trees(settings, own_loop=engine.own_loop)
    if settings.draft is not None:
        method = method_of(settings.draft)
        learns = method.trains or not settings.TRAINS
        require(learns, "draft", "has no weights to train", settings.draft.name)
        method.check(settings)
        engine.check_draft(method, settings.draft, settings.engine)
    return settings
