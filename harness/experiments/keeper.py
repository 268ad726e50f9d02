"""Plans, places and loads the pair of a run, keeps it for the runs that follow, and opens the engine of a run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from harness.config.run import RunSettings
from harness.config.settings import DecodingSettings
from harness.engines.huggingface import HuggingFaceEngine, check_pair
from harness.engines.local import LocalEngine
from harness.engines.pair import Pair, PlacedPair, PlannedPair, plan_pair, plan_tokenizer
from harness.engines.protocol import Engine
from harness.engines.runner_choice import is_spoiled, resolve
from harness.engines.server import ServerEngine
from harness.engines.vllm import VllmEngine
from harness.models.case import Demand


class PairKeeper:
    """Plans and loads pairs, and keeps the last one for the next run with the same pair.

    Args:
        report: called with `True` before a step that may fail for this pair, and `False` after it.
    """

    is_spoiled = staticmethod(is_spoiled)  # for processes that know experiments only through it

    def __init__(self, report: Callable[[bool], None] = lambda begins: None) -> None:
        self._report = report
        self._settings: object = None
        self._planned: PlannedPair | None = None
        self._placed: PlacedPair | None = None
        self._pair: Pair | None = None

    def plan(self, settings: RunSettings) -> PlannedPair:
        """See `plan_pair`."""
        if self._planned is None or self._settings != settings.pair:
            self._planned = self._placed = self._pair = None
            self._report(True)
            models = settings.model, settings.draft, settings.placement, settings.dtype
            if settings.engine.computes_here:
                self._planned = plan_pair(*models, weights=settings.weights)
            else:
                self._planned = plan_tokenizer(settings.model)
            self._report(False)
            self._settings = settings.pair
        return self._planned

    def place(self, settings: RunSettings, demand: Demand) -> PlacedPair:
        """Place the pair with room for the demand; one that is loaded stays where it is."""
        if self._placed is None or self._pair is None:
            self._placed = self.plan(settings).place(demand, force=settings.force)
        resolve(settings.runner, self._placed.devices)
        return self._placed

    def load(self) -> Pair:
        """The pair that was placed last."""
        assert self._placed is not None
        if self._pair is None:
            self._report(True)
            self._pair = self._placed.load()
            # Loading leaves much behind, and nothing that follows looks through it again.
            gc.collect()
            self._report(False)
        return self._pair

    def open(
        self,
        settings: RunSettings,
        decoding: DecodingSettings,
        batch_size: int,
        longest_prompt: int,
        **options: Any,
    ) -> Engine:
        """The engine that the settings name, for questions with this `decoding`; the only place that knows them all.

        Args:
            batch_size: the most prompts of a question; a server gets as many requests at once.
            longest_prompt, options: see `LocalEngine`.

        Raises:
            SettingError, RunError: as the engine's class says.
        """
        engine, planned = settings.engine, self.plan(settings)
        if engine.name == "server":
            model, say = settings.model.repository, options["say"]
            return ServerEngine(engine, planned.tokenizer, model, batch_size, say)
        if engine.name == "vllm":
            say = options["say"]
            return VllmEngine(settings, decoding, planned, batch_size, longest_prompt, say)
        options |= {"batch_size": batch_size, "longest_prompt": longest_prompt}
        if engine.name == "huggingface":
            check_pair(planned, decoding, engine.schedule)
            return HuggingFaceEngine(self.load(), decoding, schedule=engine.schedule, **options)
        return LocalEngine(self.load(), decoding, runner=settings.runner, **options)
