"""All engines by name, and which one a run uses."""

from __future__ import annotations

from harness.config.errors import SettingError
from harness.config.installation import CONF
from harness.config.registry import SettingsRegistry
from harness.config.run import RunSettings
from harness.engines.record import EngineRecord


class Engines(SettingsRegistry[EngineRecord]):
    key = "name"
    default = "local"


# Each is where its code is; the simulated one is in a file, as a user's own would be.
_BUILT_IN = {
    "huggingface": "harness.local.engine.records:HuggingFace",
    "local": "harness.local.engine.records:Local",
    "server": "harness.servers.record:ServerRecord",
    "simulated": f"{CONF / 'engine' / 'simulated_engine.py'}:Simulated",
}
ENGINES = Engines("engine", EngineRecord, _BUILT_IN)


def engine_of(settings: RunSettings) -> EngineRecord:
    """The engine of a run."""
    return ENGINES[settings.engine.name]


def default_draft(engine: str) -> str | None:
    """The draft that an engine uses if none is named; None if the model's preset decides.

    None also for an engine that does not exist, which is reported later.
    """
    try:
        return ENGINES[engine].default_draft
    except SettingError:
        return None


def pair_key(settings: RunSettings) -> tuple[object, ...]:
    """Equal for runs that can share the models and the engine of one process."""
    engine = engine_of(settings)
    return *settings.pair_identity, engine.loads_pair, engine.in_process
