"""The registry of engines by their names, and the engine that a run uses."""

from __future__ import annotations

from harness.config.errors import SettingError
from harness.config.installation import CONF
from harness.config.registry import SettingsRegistry
from harness.config.run import RunSettings
from harness.engines.record import EngineRecord


class Engines(SettingsRegistry[EngineRecord]):
    """The registry of engines. The setting `engine.name` names one; without it, the engine is `local`."""

    key = "name"
    default = "local"


# For each engine's name, the place of its record. The simulated engine is in a file, like an engine that a user wrote.
_BUILT_IN = {
    "huggingface": "harness.local.engine.records:HuggingFace",
    "local": "harness.local.engine.records:Local",
    "server": "harness.servers.record:ServerRecord",
    "simulated": f"{CONF / 'engine' / 'simulated_engine.py'}:Simulated",
}
ENGINES = Engines("engine", EngineRecord, _BUILT_IN)


def engine_of(settings: RunSettings) -> EngineRecord:
    """Return the record of the engine that a run uses."""
    return ENGINES[settings.engine.name]


def default_draft(engine: str) -> str | None:
    """Return the draft that an engine uses if the user names none; None if the model's preset decides.

    The result is also None for an unknown engine. Its name is refused later.
    """
    try:
        return ENGINES[engine].default_draft
    except SettingError:
        return None


def pair_key(settings: RunSettings) -> tuple[object, ...]:
    """Return a key that is equal for two runs if one process can carry out both with the same loaded models."""
    engine = engine_of(settings)
    return *settings.pair_identity, engine.loads_pair, engine.in_process
