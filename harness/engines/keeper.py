"""Plans, places and loads the pair of a run, keeps it for later runs, and opens its engine.

A `Session` asks it in this order: `plan` reads configurations and tokenizers, `place` fits the models into memory,
`open` makes the engine, which loads weights (`load`) if it needs them. A sweep's worker keeps one keeper for all its
jobs, so that a pair loads once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.demand import Demand
from harness.config.installation import is_installed
from harness.config.model_names import SERVED
from harness.config.run import RunSettings
from harness.engines.door import local
from harness.engines.protocol import Engine
from harness.engines.record import Opening, Preparation
from harness.engines.registry import engine_of, pair_key
from harness.engines.tokenizer import AnyPair, ServedPair, TextTokenizer

if TYPE_CHECKING:
    from harness.local.drafting.method import Pair
    from harness.local.engine.pair import PlacedPair, PlannedPair


class PairKeeper:
    """Keeps the last pair for the next run with the same one.

    Args:
        note_loading: called with True before a pair is planned or loaded, and with False when that
            has succeeded. So a sweep knows of a run that failed whether its pair was the reason.

    Attributes:
        is_spent: as of `Engine`, of the engines so far.
    """

    def __init__(self, note_loading: Callable[[bool], None] = lambda begins: None) -> None:
        self.is_spent = False
        self._note_loading = note_loading
        self._planned: AnyPair | None = None
        self._planned_key: object = None
        self._placed: PlacedPair | None = None
        self._pair: Pair | None = None

    def plan(self, settings: RunSettings) -> AnyPair:
        """Read and check what can be known of the settings' pair before weights load.

        Frees the kept pair if it is another one.
        """
        key = pair_key(settings)
        if self._planned is None or self._planned_key != key:
            self._planned = None
            self._let_go()
            with self._loading():
                self._planned = _planned_pair(settings)
            self._planned_key = key
        # A kept pair, too: decoding settings may differ.
        engine_of(settings).check_pair(self._planned, settings)
        return self._planned

    def place(self, settings: RunSettings, demand: Demand) -> PlacedPair:
        """Choose devices with room for the demand.

        A loaded pair stays where it is if this demand would be placed in the same way.
        """
        planned = self.plan(settings)
        assert not isinstance(planned, ServedPair)
        if self._placed is not None and self._pair is not None:
            if self._placed.suits(demand, force=settings.force):
                return self._placed
            self._let_go()
        self._placed = planned.place(demand, force=settings.force)
        return self._placed

    def load(self) -> Pair:
        """Load the pair that was placed last."""
        assert self._placed is not None
        if self._pair is None:
            with self._loading():
                self._pair = self._placed.load()
                # Loading leaves garbage, which would stay: `timing` freezes what exists.
                gc.collect()
        return self._pair

    def _let_go(self) -> None:
        """Free the memory of the loaded pair, if there is one."""
        devices = list(self._pair.devices) if self._pair is not None else []
        self._placed = self._pair = None
        if devices:
            gc.collect()
            local("models.devices").release_memory(devices)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        self._note_loading(True)
        yield
        self._note_loading(False)  # not after an exception

    def open(
        self, settings: RunSettings, preparation: Preparation, directory: Path = Path()
    ) -> Engine:
        """Open the engine that the settings name.

        Args:
            directory: the run's, where the engine writes files.

        Raises:
            SettingError: for what the engine cannot do.
            RunError: the engine does not start.
        """
        # An opening is a preparation, too.
        opening = Opening(
            **vars(preparation),
            settings=settings,
            planned=self.plan(settings),
            load=self.load,
            directory=directory,
        )
        engine = engine_of(settings).open(opening)
        self.is_spent |= engine.is_spent
        return engine


def _planned_pair(settings: RunSettings) -> AnyPair:
    """Plan the pair. Of an engine elsewhere only the tokenizer is loaded; `TextTokenizer` stands in for it where the
    model is unknown, or transformers is missing.
    """
    if not engine_of(settings).in_process:
        if settings.model.repository == SERVED or not is_installed("transformers"):
            return ServedPair(TextTokenizer())
        local("models.quiet").quiet_libraries(loads_weights=False)
        return ServedPair(local("models.tokenizers").load_tokenizer(settings.model))
    planned: PlannedPair = local("engine.pair").plan_pair(
        settings.model,
        settings.draft,
        settings.placement,
        settings.dtype,
        weights=settings.weights,
    )
    return planned
