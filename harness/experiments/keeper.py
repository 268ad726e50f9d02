"""Plans, places and loads the pair of a run, and keeps it for the runs that follow."""

from __future__ import annotations

import gc
from collections.abc import Callable

from harness.config.run import RunSettings
from harness.engines.runner_choice import resolve
from harness.models.fit import Demand
from harness.models.pair import Pair, PlacedPair, PlannedPair, plan_pair, plan_tokenizer


class PairKeeper:
    """Plans and loads pairs, and keeps the last one for the next run with the same pair.

    Args:
        report: called with `True` before a step that may fail for this pair, and `False` after it.
    """

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
        """Place the pair with room for what the run needs; one that is loaded stays where it is."""
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
