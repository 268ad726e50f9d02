"""Plans, places and loads the pair of a run, keeps it for later runs, and opens its engine."""

from __future__ import annotations

import gc
from collections.abc import Callable

from harness.config.run import RunSettings
from harness.config.settings import DecodingSettings, Fault
from harness.engines.pair import Pair, PlacedPair, PlannedPair, plan_pair, plan_tokenizer
from harness.engines.protocol import Engine
from harness.engines.runner_choice import is_spoiled, resolve
from harness.menu.engine import Opening
from harness.menu.records import engine_of, pair_of
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
        if self._planned is None or self._settings != pair_of(settings):
            self._planned = self._placed = self._pair = None
            self._report(True)
            models = settings.model, settings.draft, settings.placement, settings.dtype
            if engine_of(settings).computes_here:
                self._planned = plan_pair(*models, weights=settings.weights)
            else:
                self._planned = plan_tokenizer(settings.model)
            self._report(False)
            self._settings = pair_of(settings)
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
        *,
        say: Callable[[str], None],
        share_prefix: bool = False,
        fault: Fault = "none",
    ) -> Engine:
        """Open the engine that the settings name, for questions with this `decoding`.

        See `Opening` for the arguments.

        Raises:
            SettingError: for what the engine cannot do.
            RunError: the engine does not start.
        """
        opening = Opening(
            settings=settings,
            decoding=decoding,
            planned=self.plan(settings),
            load=self.load,
            batch_size=batch_size,
            longest_prompt=longest_prompt,
            say=say,
            share_prefix=share_prefix,
            fault=fault,
        )
        return engine_of(settings).open(opening)
