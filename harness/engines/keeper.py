"""Plans, places and loads the pair of a run, keeps it for later runs, and opens the run's engine.

A `Session` calls the methods of a `PairKeeper` in this order:

    plan     reads configurations and tokenizers
    place    fits the models into memory
    open     makes the engine, which calls `load` if it needs the weights

The worker process of a sweep uses one keeper for all its jobs, so that a pair is loaded only once.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.demand import Demand
from harness.config.installation import is_installed
from harness.config.model_names import SERVED
from harness.config.run import RunSettings
from harness.engines.door import local
from harness.engines.protocol import Engine
from harness.engines.record import Opening, Preparation, engine_of, pair_key
from harness.engines.tokenizer import AnyPair, ServedPair, TextTokenizer

if TYPE_CHECKING:
    from harness.local.drafting.method import Pair
    from harness.local.engine.pair import PlacedPair


class PairKeeper:
    """Keeps the last pair, because the next run may use the same pair.

    Attributes:
        is_spent: whether `is_spent` was True for any engine that this keeper opened: then the process can open no
            further engine of this kind.
    """

    def __init__(self) -> None:
        self.is_spent = False
        self._planned: AnyPair | None = None
        self._planned_key: object = None
        self._placed: PlacedPair | None = None
        self._pair: Pair | None = None

    def plan(self, settings: RunSettings) -> AnyPair:
        """Read the configurations and tokenizers of the pair that the settings name, and check everything that can be
        checked before weights load.

        If the settings name another pair than the kept one, the kept pair is freed.

        Raises:
            SettingError, RunError: the pair cannot be read, or the engine cannot run it.
        """
        key = pair_key(settings)
        if self._planned is None or self._planned_key != key:
            self._planned = None
            self._let_go()
            self._planned = _planned_pair(settings)
            self._planned_key = key
        # A kept pair is checked again, because the decoding settings of this run may differ.
        engine_of(settings).check_pair(self._planned, settings)
        return self._planned

    def place(self, settings: RunSettings, demand: Demand) -> PlacedPair:
        """Choose devices that have room for the demand. This is only for engines that run in this process.

        A loaded pair stays where it is if it would be placed on the same devices for the new demand. Otherwise it is
        freed.

        Raises:
            SettingError, RunError: as from `plan`.
            RunError: the pair does not fit.
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
        """Return the pair that was placed last, after loading it if it is not loaded yet. `place` must have been called
        before.

        Raises:
            SettingError, RunError: the pair cannot be loaded.
        """
        assert self._placed is not None
        if self._pair is None:
            self._pair = self._placed.load()
            # Loading leaves garbage. It is collected now, because when timing begins, `timing` exempts all existing
            # objects from later collections.
            gc.collect()
        return self._pair

    def _let_go(self) -> None:
        """Forget the placed pair, and free its memory if it was loaded."""
        devices = list(self._pair.devices) if self._pair is not None else []
        self._placed = self._pair = None
        if devices:
            gc.collect()
            local("models.devices").release_memory(devices)

    def open(
        self, settings: RunSettings, preparation: Preparation, directory: Path = Path()
    ) -> Engine:
        """Open the engine that the settings name.

        Args:
            directory: the run's directory, where the engine may write files.

        Raises:
            SettingError: the engine cannot do what the settings require.
            RunError: the engine does not start.
        """
        # `Opening` is a subclass of `Preparation`, so that it takes all fields of `preparation`.
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
    """Plan the pair. For an engine in another process, load only the tokenizer.

    If the served model is not known (`SERVED`), or if transformers is not installed, a `TextTokenizer` replaces the
    tokenizer.
    """
    if not engine_of(settings).in_process:
        if settings.model.repository == SERVED or not is_installed("transformers"):
            return ServedPair(TextTokenizer())
        local("models.quiet").quiet_libraries(loads_weights=False)
        return ServedPair(local("models.tokenizers").load_tokenizer(settings.model))
    return local("engine.pair").plan_pair(
        settings.model,
        settings.draft,
        settings.placement,
        settings.dtype,
        weights=settings.weights,
    )
