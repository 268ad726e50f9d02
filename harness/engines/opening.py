"""The engine that a run asks for, opened: the only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.config.run import RunSettings
from harness.config.settings import DecodingSettings
from harness.engines.huggingface import HuggingFaceEngine, check_pair
from harness.engines.local import LocalEngine
from harness.engines.protocol import Engine
from harness.engines.server import ServerEngine
from harness.engines.vllm import VllmEngine
from harness.models.pair import Pair, PlannedPair


def open_engine(
    settings: RunSettings,
    decoding: DecodingSettings,
    planned: PlannedPair,
    load: Callable[[], Pair],
    *,
    batch_size: int,
    longest_prompt: int,
    **options: Any,
) -> Engine:
    """The engine that `settings` name.

    Args:
        decoding: of the questions.
        planned: the pair; of a server's, the tokenizer alone.
        load: gives the pair; called only for engines that have it in this process, see `EngineSettings.loads_pair`.
        batch_size: the most prompts of a question; a server gets as many requests at once.
        longest_prompt, options: see `LocalEngine`.

    Raises:
        SettingError, RunError: as the engine's class says.
    """
    engine = settings.engine
    if engine.name == "server":
        return ServerEngine(engine, planned.tokenizer, settings.model.repository, batch_size)
    if engine.name == "vllm":
        return VllmEngine(settings, decoding, planned, batch_size, longest_prompt)
    options |= {"batch_size": batch_size, "longest_prompt": longest_prompt}
    if engine.name == "huggingface":
        check_pair(planned, decoding, engine.schedule)
        return HuggingFaceEngine(load(), decoding, schedule=engine.schedule, **options)
    return LocalEngine(load(), decoding, runner=settings.runner, **options)
