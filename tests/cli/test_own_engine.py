"""Mistakes around an engine in a file of the user's. Sweeps run such engines in tests/cli/test_survival.py."""

from __future__ import annotations

from in_process import QUICKEST_PAIR, Harness
from wicked_engine import FILE


def test_its_mistakes_are_those_of_a_setting(harness: Harness) -> None:
    def refused(engine: str, *typed: str) -> str:
        return harness.refused("latency", *QUICKEST_PAIR, f"engine={engine}", *typed)

    own = f"{FILE}:Wicked"
    assert refused(own, "engine.step_ms=0").startswith("engine.step_ms=0.0: must be at least")
    assert refused(own, "engine.stp_ms=2").startswith(
        "engine.stp_ms: no such setting (did you mean"
    )
    assert refused(own, "runner=static") == "runner=static: needs engine=local"
    assert refused(own, "engine.url=http://h/v1") == "engine.url: needs engine=server"
    assert "there is no file" in refused("./nothing.py:Parrot")
    inherit = "must inherit from harness.engines.record.EngineRecord"
    assert inherit in refused(f"{FILE}:FILE")
