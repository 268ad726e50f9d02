"""Set-up for runs of `latency`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_rest_between_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine does after a lap matters to its times alone, which no test asserts."""
    monkeypatch.setattr("harness.measuring.interleaving._REST_S", 0.0)
