"""Answers the instrument (`engines/door/wing.py`). Imports are inside the calls: most are slow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from harness.engines.door.wing import LocalWing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from harness.config.demand import Demand
    from harness.config.run import RunSettings, Weights
    from harness.config.settings import (
        DecodingSettings,
        DraftSettings,
        Dtype,
        ModelSettings,
        PlacementSettings,
    )
    from harness.engines.door.pairs import Pair, PlacedPair, PlannedPair
    from harness.engines.door.plans import Machine, PairPlan, PassBytes, PretendedGpus, Roof
    from harness.engines.door.profiles import Profile
    from harness.engines.door.reading import TextReader
    from harness.engines.door.reference import Reference
    from harness.engines.door.serving import Service
    from harness.engines.protocol import Arm, Engine, Question
    from harness.engines.record import Preparation
    from harness.engines.tokenizer import Tokenizer


class Wing(LocalWing):
    def load_tokenizer(self, model: ModelSettings) -> Tokenizer:
        from harness.local.models.quiet import quiet_libraries
        from harness.local.models.tokenizers import load_tokenizer

        quiet_libraries(loads_weights=False)
        return load_tokenizer(model)

    def plan_pair(
        self,
        target: ModelSettings,
        draft: DraftSettings | None,
        placement: PlacementSettings,
        dtype: Dtype = "auto",
        *,
        weights: Weights = "stored",
    ) -> PlannedPair:
        from harness.local.engine.pair import plan_pair

        return plan_pair(target, draft, placement, dtype, weights=weights)

    def open_reference(
        self, pair: Pair, preparation: Preparation, never_drawn: Collection[int] = ()
    ) -> Reference:
        from harness.local.engine.pair import Pair
        from harness.local.engine.reference import open_reference

        assert isinstance(pair, Pair)
        return open_reference(pair, preparation, never_drawn)

    def release_memory(self, devices: Sequence[Any]) -> None:
        from harness.local.models.devices import release_memory

        release_memory(devices)

    def check_hub_access(
        self, repository: str, file: str, revision: str | None, kind: Literal["model", "dataset"]
    ) -> None:
        from harness.local.models.checkpoints import check_hub_access

        check_hub_access(repository, file, revision, kind)

    def find_machine(self, settings: RunSettings, pretended: PretendedGpus | None) -> Machine:
        from harness.local.engine.planning import find_machine

        return find_machine(settings, pretended)

    def plan_on(
        self,
        machine: Machine,
        settings: RunSettings,
        prompt_length: int,
        draft_tokens: Iterable[int],
    ) -> PairPlan:
        from harness.local.engine.planning import plan_on

        return plan_on(machine, settings, prompt_length, draft_tokens)

    def pass_bytes(
        self, placed: PlacedPair, demand: Demand, draft_tokens: Iterable[int]
    ) -> PassBytes | None:
        from harness.local.engine.pair import PlacedPair
        from harness.local.engine.planning import pass_bytes

        assert isinstance(placed, PlacedPair)
        return pass_bytes(placed.case(placed.free, demand), draft_tokens)

    def roofs(self, placed: PlacedPair, batch_size: int, num_tokens: int) -> Sequence[Roof]:
        from harness.local.engine.pair import PlacedPair
        from harness.local.engine.roofline import roofs

        assert isinstance(placed, PlacedPair)
        return roofs(placed, batch_size, num_tokens)

    def open_reader(
        self, pair: Pair, decoding: DecodingSettings, most: int, *, greedy_draft: bool = False
    ) -> TextReader:
        from harness.local.engine.pair import Pair
        from harness.local.engine.reading import PairReader

        assert isinstance(pair, Pair)
        return PairReader(pair, decoding, most, greedy_draft=greedy_draft)

    def profile_arms(
        self, arms: Sequence[Arm], devices: Sequence[Any], question: Question, directory: Path
    ) -> Sequence[Profile]:
        from harness.local.engine.profiling import profile_arms

        return profile_arms(arms, devices, question, directory)

    def start_service(
        self,
        open_engine: Callable[[], Engine],
        tokenizer: Tokenizer,
        max_rows: int,
        max_waiting: int,
    ) -> Service:
        from harness.local.serving.service import LocalService

        return LocalService(open_engine, tokenizer, max_rows, max_waiting)


WING = Wing()
