"""Failures of the machine in words."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError

from harness.config.errors import RunError, UnreachableError
from harness.config.failures import as_run_error, explained
from harness.config.settings import ModelSettings

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
    assert text.startswith(
        "out of GPU memory on GPU 1: 2.00 GiB wanted, 1.20 GiB of 23.64 GiB free\n"
    )
    assert "batch_size" in text
    assert said(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")).startswith(
        "out of GPU memory\n"
    )
    assert "out of GPU memory" in said(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    )


def test_main_memory_exhausted_for_real() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15, dtype=torch.uint8)
    assert said(raised.value).startswith("out of main memory: 1000000.0 GB wanted, ")
    assert said(MemoryError()).startswith("out of main memory, ")


def test_fabric_manager() -> None:
    text = said(RuntimeError(ERROR_802))
    assert "sudo systemctl start nvidia-fabricmanager" in text
    assert "machine-install.sh" in text


def test_other_known_failures() -> None:
    assert "driver is too old" in said(
        RuntimeError("The NVIDIA driver on your system is too old (found 11040)")
    )
    assert "does not support this GPU" in said(
        RuntimeError("CUDA error: no kernel image is available for execution")
    )
    assert "the disk is full: /a/b" in said(
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b")
    )
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert f"the disk is full: {text}" in said(RuntimeError(text))
    error = RunError("as it is")
    assert as_run_error(error) is error


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("a bug"),
        RuntimeError("shape mismatch"),
        OSError(errno.ENOENT, "absent"),
        KeyError("802"),
    ],
)
def test_unknown_failures_stay_what_they_are(exception: Exception) -> None:
    assert as_run_error(exception) is None


@pytest.mark.gpu
def test_gpu_out_of_memory_for_real() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(10**14, dtype=torch.uint8, device="cuda")
    assert "on GPU 0: " in said(raised.value)
    assert "wanted" in said(raised.value)


def test_an_interruption_behind_an_error_of_a_library_is_what_is_raised() -> None:
    """A signal while weights load came out of torch as "trying to pop from empty mode stack"."""
    settings = ModelSettings(name="tiny", repository="tiny")
    error = RuntimeError("trying to pop from empty mode stack")
    # As Python sets it for an error that is raised while another one is handled.
    error.__context__ = ValueError()
    error.__context__.__context__ = interruption = KeyboardInterrupt("stopped by SIGTERM")
    assert explained(error, "model", settings) is interruption


def test_a_repository_without_a_file_was_reached() -> None:
    """A sweep would try one that is out of reach again with every job."""
    settings = ModelSettings(name="a/b", repository="a/b")
    missing = OSError("a/b does not appear to have a file named config.json. Checkout ...")
    missing.__cause__ = type(
        "EntryNotFoundError", (HfHubHTTPError,), {"__init__": lambda _: None}
    )()
    error = explained(missing, "model", settings)
    assert not isinstance(error, UnreachableError)
    assert "model: a/b cannot be loaded: a/b does not appear to have a file" in str(error)
