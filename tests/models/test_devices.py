"""GPUs, memory and names; and failures of the machine in words."""

from __future__ import annotations

import errno
import os
import pickle

import psutil
import pytest
import torch

from harness.config.errors import RunError, SettingError
from harness.config.settings import PlacementSettings
from harness.models.devices import (
    as_run_error,
    free_memory,
    peak_memory_bytes,
    reset_peak_memory,
    synchronize,
    visible_gpus,
)

CPU = torch.device("cpu")

# As torch raises them.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.64 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 22.43 GiB memory in use."
)
ERROR_802 = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 802: system not yet initialized"
)


def said(exception: BaseException) -> str:
    error = as_run_error(exception)
    assert error is not None
    assert len(str(error).splitlines()) <= 2
    return str(error)


def test_gpu_out_of_memory() -> None:
    text = said(torch.OutOfMemoryError(OUT_OF_MEMORY))
    assert text.startswith("out of GPU memory on GPU 1: 2.00 GiB wanted, 1.20 GiB of 23.64 GiB free\n")
    assert "batch_size" in text
    assert said(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")).startswith(
        "out of GPU memory\n"
    )
    assert "out of GPU memory" in said(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))


def test_main_memory_exhausted_for_real() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15, dtype=torch.uint8)
    assert said(raised.value).startswith("out of main memory: 1000000.0 GB wanted, ")
    assert said(MemoryError()).startswith("out of main memory, ")


def test_fabric_manager() -> None:
    text = said(RuntimeError(ERROR_802))
    assert "sudo systemctl start nvidia-fabricmanager" in text
    assert "machine-install.sh" in text


def test_cuda_that_does_not_start_is_an_error_and_not_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(ERROR_802)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(RunError, match="fabric manager"):
        visible_gpus(PlacementSettings())
    assert visible_gpus(PlacementSettings(strategy="cpu")) == []


def test_other_known_failures() -> None:
    assert "driver is too old" in said(RuntimeError("The NVIDIA driver on your system is too old (found 11040)"))
    assert "does not support this GPU" in said(RuntimeError("CUDA error: no kernel image is available for execution"))
    assert "the disk is full: /a/b" in said(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b"))
    error = RunError("as it is")
    assert as_run_error(error) is error


@pytest.mark.parametrize(
    "exception", [ValueError("a bug"), RuntimeError("shape mismatch"), OSError(errno.ENOENT, "absent"), KeyError("802")]
)
def test_unknown_failures_stay_what_they_are(exception: Exception) -> None:
    assert as_run_error(exception) is None


def test_translated_errors_survive_processes() -> None:
    error = as_run_error(RuntimeError(ERROR_802))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_cpu() -> None:
    assert peak_memory_bytes([CPU]) is None
    reset_peak_memory([CPU])
    synchronize([CPU])
    free = free_memory([])
    assert set(free) == {"cpu"}
    assert 0 < free["cpu"] <= psutil.virtual_memory().total


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert visible_gpus(PlacementSettings(gpus=4)) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_gpus(PlacementSettings()) == [0, 1, 2]
    assert visible_gpus(PlacementSettings(gpus=2)) == [0, 1]
    with pytest.raises(SettingError, match=r"^placement\.gpus=4: must not exceed the number of visible GPUs, 3$"):
        visible_gpus(PlacementSettings(gpus=4))
    with pytest.raises(SettingError, match=r"^draft\.gpus=5: "):
        visible_gpus(PlacementSettings(gpus=5), "draft.gpus")


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


@pytest.mark.gpu
def test_gpu_out_of_memory_for_real() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(10**14, dtype=torch.uint8, device="cuda")
    assert "on GPU 0: " in said(raised.value)
    assert "wanted" in said(raised.value)
