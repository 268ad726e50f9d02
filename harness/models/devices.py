"""What the machine has: its GPUs, their memory, their names, and what their failures mean."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Sequence

import psutil
import torch

from harness.config.errors import RunError, SettingError
from harness.config.settings import PlacementSettings
from harness.models.tensor_parallel import ended_rank, sum_over_ranks, world


def visible_gpus(placement: PlacementSettings, setting: str = "placement.gpus") -> list[int]:
    """Indices of the GPUs that `placement` may use, from the first visible one on; empty where everything is the CPU's.

    Args:
        placement: strategy and number of GPUs.
        setting: what the number of GPUs is called in the error.

    A rank of several has one, its own.

    Raises:
        SettingError: if more GPUs are wanted than are visible (on a machine without any, the CPU does).
        RunError: if there are GPUs and CUDA does not start.
    """
    if placement.strategy == "cpu":
        return []
    count = torch.cuda.device_count()
    if count == 0:
        return []
    # The count comes from the driver's library and needs no CUDA. `is_available()` would turn a failed start into a
    # warning and a silent run on the CPU.
    try:
        torch.cuda.init()
    except RuntimeError as exception:
        raise as_run_error(exception) or RunError(f"CUDA does not start: {_first_line(exception)}") from exception
    if placement.gpus is not None and placement.gpus > count:
        raise SettingError(setting, f"must not exceed the number of visible GPUs, {count}", placement.gpus)
    if (ranks := world()).size > 1:
        if ranks.size > count:
            raise SettingError(setting, f"must not exceed the number of visible GPUs, {count}", ranks.size)
        return [ranks.rank]
    return list(range(count))[: placement.gpus]


def free_memory(gpus: Iterable[int] | None = None) -> dict[int | str, int]:
    """Bytes that can still be allocated on each of `gpus` (None: all visible ones) and, as `"cpu"`, in main memory.

    What torch holds in its cache without using it counts as free. Naming no GPU starts no CUDA.
    """
    free: dict[int | str, int] = {}
    for gpu in range(torch.cuda.device_count()) if gpus is None else gpus:
        cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        free[gpu] = torch.cuda.mem_get_info(gpu)[0] + cached
    free["cpu"] = psutil.virtual_memory().available
    return free


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every GPU among `devices` has finished what was queued."""
    for device in _gpus(devices):
        torch.cuda.synchronize(device)


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Start `peak_memory_bytes` anew."""
    for device in _gpus(devices):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(devices: Sequence[torch.device]) -> int | None:
    """The most bytes torch had allocated since the last reset, summed over the GPUs among `devices`; None without one.

    Each GPU's own peak counts, so the sum may exceed what was held at any one moment. Ranks add up theirs.
    """
    gpus = _gpus(devices)
    return sum_over_ranks(sum(torch.cuda.max_memory_allocated(device) for device in gpus)) if gpus else None


def as_run_error(exception: BaseException) -> RunError | None:
    """The failure in one or two lines, where it is one that is known; None otherwise.

    Knows exhausted GPU and main memory, a full disk, and CUDA that does not start or does not suit the GPU.
    """
    if isinstance(exception, RunError):
        return exception
    if (ended := ended_rank(exception)) is not None:
        return ended
    text = str(exception)
    if isinstance(exception, torch.OutOfMemoryError) or re.search(r"CUDA.*out of memory|CUBLAS_STATUS_ALLOC", text):
        return RunError(
            f"out of GPU memory{_allocation(text)}\n"
            "what helps: a smaller batch_size, fewer decoding.max_new_tokens, model.quantization=4bit, more GPUs"
        )
    if isinstance(exception, MemoryError) or "can't allocate memory" in text or "not enough memory" in text:
        wanted = re.search(r"tried to allocate (\d+) bytes", text)
        amount = f": {int(wanted[1]) / 1e9:.1f} GB wanted" if wanted else ""
        return RunError(f"out of main memory{amount}, {psutil.virtual_memory().available / 1e9:.1f} GB free")
    if isinstance(exception, OSError) and exception.errno == errno.ENOSPC:
        return RunError(
            f"the disk is full: {exception.filename or _first_line(exception)}"
            "\n(HF_HOME chooses where downloaded weights go)"
        )
    if "802" in text and "system not yet initialized" in text:
        return RunError(
            "CUDA error 802, system not yet initialized: this machine's NVSwitch needs the fabric manager\n"
            "start it with `sudo systemctl start nvidia-fabricmanager` (machine-install.sh installs it)"
        )
    if "driver version is insufficient" in text or "driver on your system is too old" in text:
        return RunError(
            f"the NVIDIA driver is too old for this build of torch (CUDA {torch.version.cuda})\n"
            "update the driver (machine-install.sh says how), or install torch for an older CUDA"
        )
    if "no kernel image is available" in text:
        return RunError(
            f"this build of torch ({torch.__version__}) does not support this GPU: install one that does\n"
            "(https://pytorch.org/get-started/locally)"
        )
    return None


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def _allocation(text: str) -> str:
    """What torch's message says was wanted and free: ` on GPU 0: 2.00 GiB wanted, 1.20 GiB of 23.64 GiB free`."""
    wanted = re.search(r"Tried to allocate ([\d.]+ \wi?B)", text)
    free = re.search(r"GPU (\d+) has a total capacity of ([\d.]+ \wi?B) of which ([\d.]+ \wi?B) is free", text)
    if wanted and free:
        return f" on GPU {free[1]}: {wanted[1]} wanted, {free[3]} of {free[2]} free"
    return f": {wanted[1]} wanted" if wanted else ""


def _first_line(exception: BaseException) -> str:
    return str(exception).strip().split("\n")[0]
