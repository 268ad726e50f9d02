"""GPUs and free memory."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from harness.config.errors import RunError, SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.models.devices import (
    check_gpu_numbers,
    free_memory,
    peak_memory_bytes,
    reset_peak_memory,
    synchronize,
    visible_gpus,
)

CPU = torch.device("cpu")

ERROR_802 = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"


def test_cuda_that_does_not_start_is_an_error_and_not_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError(ERROR_802)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(RunError, match="fabric manager"):
        visible_gpus()


def test_the_cpu() -> None:
    assert peak_memory_bytes([CPU]) is None
    reset_peak_memory([CPU])
    synchronize([CPU])
    free = free_memory([])
    assert set(free) == {"cpu"}
    assert 0 < free["cpu"] <= psutil.virtual_memory().total


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    for number in (0, 3):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=number: number)
        assert visible_gpus() == list(range(number))


def test_more_gpus_than_there_are() -> None:
    model = ModelSettings(name="big", repository="x/y", gpus=4)
    four = PlacementSettings(gpus=4)
    check_gpu_numbers(four, {"model": model}, 0)
    check_gpu_numbers(four, {"model": model}, 4)
    rule = r"must not exceed the number of GPUs, 3$"
    with pytest.raises(SettingError, match=rf"^placement\.gpus=4: {rule}"):
        check_gpu_numbers(four, {}, 3)
    with pytest.raises(SettingError, match=rf"^model\.gpus=4: {rule}"):
        check_gpu_numbers(PlacementSettings(), {"model": model}, 3)


def test_memory_in_pools_of_graphs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(device: int, pool: tuple[int, int]) -> dict[str, Any]:
        sizes = {"total_size": 100, "allocated_size": 30}
        return {"device": device, "segment_pool_id": pool, **sizes}

    segments = [segment(0, (0, 0)), segment(0, (0, 1)), segment(0, (1, 0)), segment(1, (0, 1))]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert peak_memory_bytes([torch.device("cuda", 0), CPU]) == 1000 + 2 * 70


@pytest.mark.gpu
def test_gpu_memory() -> None:
    gpu = torch.device("cuda", 0)
    before = free_memory([0])[0]
    reset_peak_memory([gpu])
    start = peak_memory_bytes([gpu])
    block = torch.empty(256 * 2**20, dtype=torch.uint8, device=gpu)
    synchronize([gpu])
    assert free_memory([0])[0] <= before - 200 * 2**20
    del block
    # What torch keeps in its cache is free to use.
    assert free_memory([0])[0] >= before - 2**20
    peak = peak_memory_bytes([gpu, CPU])
    assert peak is not None
    assert start is not None
    assert peak - start == 256 * 2**20
