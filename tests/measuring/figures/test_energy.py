"""Joules per token and throttled units, with a fake NVML; empty cells without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from harness.engines import energy
from harness.engines.energy import GpuMeter, GpuUse
from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.local.models import devices
from harness.local.models.devices import gpu_uuids
from harness.measuring.figures.machine import Energy
from in_process import QUICKEST_PAIR, Harness, results
from measured_runs import figures
from wording import mentions


class Nvml:
    """Two GPUs: each reading finds that the first took 2 J more, and the second 1 J; the second may be hot.

    CUDA has them in the other order: its fastest GPU comes first.
    """

    uuids = ("GPU-aaaa", "GPU-bbbb")
    of_cuda = ("bbbb", "aaaa")

    class NVMLError(Exception):
        """NVML's error."""

    def __init__(self, *, counts: bool = True, hot: bool = False, divided: bool = False) -> None:
        self.counts = counts
        self.hot = hot
        self.divided = divided
        self.millijoules = {0: 1_000_000, 1: 5_000_000}

    def nvmlInit(self) -> None:
        """NVML is there."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise self.NVMLError
        return self.uuids.index(uuid)

    def nvmlDeviceGetMigMode(self, gpu: int) -> list[int]:
        if gpu == 1:
            raise self.NVMLError  # of a kind that cannot be divided
        return [int(self.divided), 1]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        if not self.counts:
            raise self.NVMLError
        self.millijoules[gpu] += (2000, 1000)[gpu]
        return self.millijoules[gpu]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        # Idling is no reason that counts.
        return 0x41 if self.hot and gpu == 1 else 0x1


def generation(joules: float | None, *throttled: str, tokens: int = 10) -> Answered:
    use = GpuUse(joules, throttled)
    return Answered(requests=[RequestRecord(0, 1, num_tokens=tokens)], seconds=0.0, gpu=use)


def test_the_meter_adds_up_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "pynvml", Nvml(hot=True))
    assert GpuMeter(["GPU-aaaa"]).stop() == GpuUse(2.0, ())
    assert GpuMeter(["GPU-aaaa", "GPU-bbbb"]).stop() == GpuUse(3.0, ("temperature (hardware)",))
    assert GpuMeter([]).stop() is None


def test_gpus_are_found_by_what_both_cuda_and_nvml_call_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml()
    monkeypatch.setattr(devices, "pynvml", nvml)

    def properties(place: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=nvml.of_cuda[place])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    first, second = (torch.device("cuda", place) for place in range(2))
    assert gpu_uuids([torch.device("cpu")]) == []
    assert gpu_uuids([first, torch.device("cpu")]) == ["GPU-bbbb"]
    assert gpu_uuids([second, first]) == ["GPU-aaaa", "GPU-bbbb"]
    assert gpu_uuids([torch.device("cuda")]) == ["GPU-bbbb"]
    # An instance of a GPU (MIG) has a name of its own, or the whole one's, and no counters.
    nvml.divided = True
    assert gpu_uuids([first]) == ["GPU-bbbb"]
    assert gpu_uuids([second]) == []
    nvml.of_cuda = ("cccc",)
    assert gpu_uuids([first]) == []


def test_a_gpu_that_does_not_count_has_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "pynvml", Nvml(counts=False))
    assert GpuMeter(["GPU-aaaa"]).stop() == GpuUse(None, ())


def test_columns_of_an_arm() -> None:
    generations = [generation(3.0), generation(5.0, "power cap"), generation(4.0, "power cap")]
    assert figures(Energy, generations, units=[0, 1, 1]) == Energy(
        num_units=2, num_throttled_units=1, joules_per_token=12 / 30
    )
    without = [generation(3.0), generation(None)]
    assert figures(Energy, without).joules_per_token is None
    assert figures(Energy, [Answered(requests=[], seconds=0.0)]) == Energy()


def test_an_answer_shorter_than_the_counters_period_empties_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml()
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: 5  # type: ignore[method-assign]
    monkeypatch.setattr(energy, "pynvml", nvml)
    assert GpuMeter(["GPU-aaaa"]).stop() == GpuUse(0.0, ())
    regular = [*[generation(4.0)] * 19, generation(0.0)]
    speculative = [generation(2.0)] * 20
    assert figures(Energy, regular).joules_per_token == 19 * 4 / 200
    ratio = figures(Energy, regular, speculative).energy_ratio
    assert ratio.estimate == pytest.approx(2.0), "the unit is left out of both arms"
    ratio = figures(Energy, speculative, regular).energy_ratio
    assert ratio.estimate == pytest.approx(0.5)
    # Where many are that short, one arm is charged for the other.
    too_short = [*[generation(4.0)] * 8, *[generation(0.0)] * 2]
    of_both = figures(Energy, speculative[:10], too_short)
    assert (of_both.joules_per_token, of_both.energy_ratio) == (None, None)


def test_the_ratio_follows_from_the_columns_where_answers_differ_in_length() -> None:
    regular = [generation(100.0, tokens=100), generation(10.0, tokens=10)]
    speculative = [generation(50.0, tokens=100), generation(10.0, tokens=10)]
    arms = figures(Energy, speculative), figures(Energy, regular, speculative)
    assert arms[0].joules_per_token == pytest.approx(60 / 110)
    assert arms[1].energy_ratio.estimate == pytest.approx(110 / 60)


def test_the_ratio_is_paired() -> None:
    """Prompts differ tenfold in energy, and speculation halves each: the interval is narrow."""
    regular = [generation(1.0 + 9 * (place % 2)) for place in range(12)]
    speculative = [generation((1.0 + 9 * (place % 2)) / 2) for place in range(12)]
    ratio = figures(Energy, regular, speculative).energy_ratio
    assert [ratio.estimate, ratio.low, ratio.high] == pytest.approx([2.0, 2.0, 2.0])
    unknown = [*speculative[:-1], generation(None)]
    assert figures(Energy, regular, unknown).energy_ratio is None


QUICK = ["latency", *QUICKEST_PAIR, "num_prompts=8", "decoding.max_new_tokens=8"]


def test_joules_are_told_where_gpus_count_them(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "pynvml", Nvml())
    monkeypatch.setattr("harness.local.models.devices.gpu_uuids", lambda used: Nvml.uuids)
    outcome = harness(*QUICK)
    regular, speculative = results().to_dict("records")
    for row in (regular, speculative):
        assert row["joules_per_token"] == pytest.approx(3 / 8)
        assert (row["num_units"], row["num_throttled_units"]) == (8, 0)
    assert speculative["energy_ratio"] == pytest.approx(1.0)
    assert mentions(outcome.summary, "0.375", "1.00×")
