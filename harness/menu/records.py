"""The registries of what a user can name, and the rules that their records have for a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from harness.config.engines import EngineSettings
from harness.config.errors import SettingError
from harness.config.run import RunSettings
from harness.config.settings import DraftSettings, require
from harness.menu.command import Command
from harness.menu.engine import EngineRecord
from harness.menu.head_kind import HeadKind
from harness.menu.hybrid import hybrid, parts
from harness.menu.method import LoadedPair, MakeDrafter, Method, TextMethod
from harness.menu.registry import Registry
from harness.menu.trees import check_trees

if TYPE_CHECKING:
    from harness.decoding.protocols import Runner

HEADS: Registry[HeadKind] = Registry("draft", HeadKind, "harness.drafting.kinds", "harness.heads")


class Methods(Registry[Method]):
    """Ways to draft, and hybrids of two of them, `suffix+model`."""

    def is_built_in(self, name: str) -> bool:
        """See `Registry.is_built_in`; of a hybrid, whether both parts are."""
        if found := self._parts(name):
            return all(super(Methods, self).is_built_in(part) for part in found)
        return super().is_built_in(name)

    def source(self, name: str) -> bytes | None:
        """See `Registry.source`; of a hybrid, the code of its text method."""
        found = self._parts(name)
        return super().source(found[0] if found else name)

    def split(self, draft: str) -> tuple[str, str] | None:
        """The text method and the other draft in a hybrid's name; None for any other name."""
        found = parts(draft)
        if found is None:
            return None
        first = found[0]
        known = first in self.names() or self.is_in_file(first)
        return found if known and isinstance(self[first], TextMethod) else None

    def _parts(self, name: str) -> tuple[str, str] | None:
        """The parts of a hybrid's method; the plus in a file's path divides nothing."""
        found = parts(name)
        if found is None or not self.is_in_file(name):
            return found
        divides = found[0] in self.names() or self.is_in_file(found[0])
        return found if divides else None

    def _load(self, name: str) -> Method:
        if (found := self._parts(name)) is None:
            return super()._load(name)
        first, second = found
        return hybrid(name, self[first], self[second])


METHODS = Methods("draft", Method, "harness.menu.methods", "harness.methods")
COMMANDS: Registry[Command] = Registry(
    "command", Command, "harness.menu.commands", "harness.commands"
)
ENGINES: Registry[EngineRecord] = Registry(
    "engine", EngineRecord, "harness.menu.engines", "harness.engines"
)


def commands() -> list[Command]:
    """Every command that needs no file, in the order in which they are listed."""
    return sorted(COMMANDS.all().values(), key=lambda command: command.place)


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


def make_drafter(pair: LoadedPair, runner: Runner | None, vocabulary_size: int) -> MakeDrafter:
    """A function from the target's warp to a drafter for a pair, which has a draft.

    Args:
        runner: of the model that drafts, if one does.
        vocabulary_size: how many tokens drafts may be.
    """
    settings = pair.drafting
    assert settings is not None
    make = method_of(settings).drafter(settings, pair, runner)
    if METHODS.is_built_in(settings.method):
        return make
    from harness.drafting.checked import CheckedDrafter

    return lambda warp: CheckedDrafter(make(warp), settings.name, vocabulary_size)


def draft_settings(config: Mapping[str, Any]) -> type[DraftSettings]:
    """The class of a draft's settings, by the method that its configuration names."""
    return METHODS[str(config.get("method", "model"))].settings


def engine_of(settings: RunSettings) -> EngineRecord:
    """The engine of a run."""
    return ENGINES[settings.engine.name]


def engine_settings(config: Mapping[str, Any]) -> type[EngineSettings]:
    """The class of an engine's settings, by the name in its configuration."""
    return ENGINES[str(config.get("name", "local"))].settings


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
    """The identity of the models and engine that a process holds for a run. Runs with the same value can share them."""
    engine = engine_of(settings)
    return *settings.pair, engine.loads_pair, engine.computes_here, engine.may_crash


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
    return settings


def without_others(draft: Mapping[str, Any], methods: Collection[str]) -> dict[str, Any]:
    """The configuration of a draft without the settings that only other ones of these methods have."""
    own = draft_settings(draft).setting_names()
    others = [name for method in methods for name in METHODS[method].settings.setting_names()]
    return _without(draft, others, own)


def without_other_engines(engine: Mapping[str, Any], engines: Collection[str]) -> dict[str, Any]:
    """The configuration of an engine without the settings that only other ones of these have."""
    own = engine_settings(engine).setting_names()
    others = [name for other in engines for name in ENGINES[other].settings.setting_names()]
    return _without(engine, others, own)


def _without(
    config: Mapping[str, Any], others: Collection[str], own: Collection[str]
) -> dict[str, Any]:
    unwanted = set(others) - set(own)
    return {key: value for key, value in config.items() if key not in unwanted}
