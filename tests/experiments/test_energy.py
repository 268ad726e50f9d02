"""Joules per token and throttled units, with a fake NVML; empty cells without one."""

from __future__ import annotations

from typing import Any

import pytest

from harness.engines import energy
from harness.engines.energy import GpuMeter, GpuUse
from harness.engines.local import LocalEngine
from harness.engines.requests import RequestRecord
from harness.engines.timing import Generation
from harness.experiments.energy import energy_columns, energy_ratio_columns
from in_process import QUICKEST_PAIR, Harness, results
from wording import mentions


class Nvml:
    """Two GPUs: each reading finds that the first took 2 J more, and the second 1 J; the second may be hot."""

    class NVMLError(Exception):
        """NVML's error."""

    def __init__(self, *, counts: bool = True, hot: bool = False) -> None:
        self.counts = counts
        self.hot = hot
        self.millijoules = {0: 1_000_000, 1: 5_000_000}

    def nvmlDeviceGetHandleByIndex(self, gpu: int) -> int:
        return gpu

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        if not self.counts:
            raise self.NVMLError
        self.millijoules[gpu] += (2000, 1000)[gpu]
        return self.millijoules[gpu]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        # Idling is no reason that counts.
        return 0x41 if self.hot and gpu == 1 else 0x1


def generation(joules: float | None, *throttled: str, tokens: int = 10) -> Generation:
    use = GpuUse(joules, throttled)
    return Generation("x", requests=[RequestRecord(0, 1, num_tokens=tokens)], gpu=use)


def test_the_meter_adds_up_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "pynvml", Nvml(hot=True))
    assert GpuMeter([0]).stop() == GpuUse(2.0, ())
    assert GpuMeter([0, 1]).stop() == GpuUse(3.0, ("temperature (hardware)",))
    assert GpuMeter([]).stop() is None


def test_a_gpu_that_does_not_count_has_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "pynvml", Nvml(counts=False))
    assert GpuMeter([0]).stop() == GpuUse(None, ())


def test_columns_of_an_arm() -> None:
    generations = [generation(3.0), generation(5.0, "power cap"), generation(4.0, "power cap")]
    assert energy_columns(generations, [0, 1, 1]) == {
        "num_units": 2,
        "num_throttled_units": 1,
        "joules_per_token": 12 / 30,
    }
    without = [generation(3.0), generation(None)]
    assert "joules_per_token" not in energy_columns(without, [0, 1])
    assert energy_columns([Generation("x")], [0]) == {}


def test_the_ratio_is_paired() -> None:
    """Prompts differ tenfold in energy, and speculation halves each: the interval is narrow."""
    regular = [generation(1.0 + 9 * (place % 2)) for place in range(12)]
    speculative = [generation((1.0 + 9 * (place % 2)) / 2) for place in range(12)]
    columns = energy_ratio_columns(regular, speculative, range(12), 500, 0)
    assert list(columns.values()) == pytest.approx([2.0, 2.0, 2.0])
    unknown = [*speculative[:-1], generation(None)]
    assert energy_ratio_columns(regular, unknown, range(12), 500, 0) == {}


QUICK = ["latency", *QUICKEST_PAIR, "num_prompts=8", "decoding.max_new_tokens=8"]


def test_joules_are_told_where_gpus_count_them(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "pynvml", Nvml())
    monkeypatch.setattr(LocalEngine, "gpus", [0, 1])
    outcome = harness(*QUICK)
    regular, speculative = results().to_dict("records")
    for row in (regular, speculative):
        assert row["joules_per_token"] == pytest.approx(3 / 8)
        assert (row["num_units"], row["num_throttled_units"]) == (8, 0)
    assert speculative["energy_ratio"] == pytest.approx(1.0)
    assert mentions(outcome.stdout, "0.375 J per token regular", "1.00×")


def test_without_gpus_the_cells_are_empty(harness: Harness) -> None:
    outcome = harness(*QUICK)
    columns = ["joules_per_token", "energy_ratio", "num_units", "num_throttled_units"]
    rows: Any = results()[columns]
    assert rows.isna().all(axis=None)
    assert "J per token" not in outcome.stdout
