"""An engine with a clock of its own: answers take the time that planted costs say, and nobody waits for them.

It generates nothing that means anything. It is for learning to read a page whose truth is known, and the test bench of
the instrument: `harness latency engine=simulated engine.step_ms=20 engine.acceptance=0.8 K=4`. Needs no torch and no
model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.config.model_names import SERVED
from harness.config.settings import ModelSettings, require
from harness.engines.record import EngineRecord, Opening
from harness.engines.simulated.settings import SimulatedSettings
from harness.results.schema import SIMULATED

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.engines.protocol import Engine


_MOST_TOKENS = 100_000


class Simulated(EngineRecord):
    """Planted costs and acceptance, on a clock of its own."""

    name = SIMULATED
    summary = (
        "planted costs and acceptance on a clock of its own, to learn and to test: no measurement"
    )
    settings = SimulatedSettings
    computes_here = False
    queues = True
    own_clock = True

    def check(self, run: RunSettings) -> None:
        super().check(run)
        number = run.decoding.max_new_tokens
        rule = f"must be at most {_MOST_TOKENS:,}: each is simulated"
        require(number <= _MOST_TOKENS, "decoding.max_new_tokens", rule, number)

    def adapted(self, run: RunSettings) -> RunSettings:
        """Without the models, whose names would look like those of a measurement."""
        run = dataclasses.replace(run, model=ModelSettings(name=SIMULATED, repository=SERVED))
        if run.draft is not None:
            run = dataclasses.replace(run, draft=dataclasses.replace(run.draft, name=SIMULATED))
        return run

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        if run.draft is None:
            return {}
        return {"num_draft_tokens": run.decoding.num_draft_tokens, "draft_method": SIMULATED}

    def open(self, opening: Opening) -> Engine:
        # The protocol is imported where it is needed: settings and help are known without it.
        from harness.engines.simulated.engine import SimulatedEngine

        return SimulatedEngine(opening)
