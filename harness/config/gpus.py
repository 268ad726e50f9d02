"""GPUs and their memory according to their makers' data sheets, from `gpus.csv`."""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU according to its maker's data sheet.

    Attributes:
        name: the product's name.
        pattern: a regular expression that matches part of the GPU's name in torch, in the system or in a table.
        memory: `own` if the GPU has its own memory, `shared` if it uses the processor's.
        memory_gb: the memory in GB as sold; the largest size that is sold under this name.
        bandwidth_gb_s: bandwidth of the memory in 10^9 bytes per second.
    """

    name: str
    pattern: str
    memory: str
    memory_gb: float
    bandwidth_gb_s: float


@functools.cache
def known_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs in `gpus.csv`, in the order of the file."""
    lines = Path(__file__).with_name("gpus.csv").read_text(encoding="utf-8").splitlines()[1:]
    return tuple(
        Gpu(name, pattern, memory, float(size), float(rate))
        for name, pattern, memory, size, rate in csv.reader(lines)
    )


def known_gpu(device_name: str) -> Gpu | None:
    """Return the first GPU in the table whose pattern matches part of `device_name`; None if none does."""
    return next((gpu for gpu in known_gpus() if re.search(gpu.pattern, device_name)), None)


def gpus_named(name: str) -> list[Gpu]:
    """Return the GPUs in the table whose names contain all words of `name`: `A100`, `h100-sxm`, `RTX4090`.

    If there are none, `name` is looked up as a name that a driver reports, such as `NVIDIA A100-SXM4-80GB`. GPUs that
    share the processor's memory are left out. The GPU with the least memory comes first. Empty for an unknown name.
    """
    # Also `RTX4090` as `rtx 4090`, in two words like the names of the table.
    words = set(re.split(r"[\s_-]+", re.sub(r"(?i)\b(rtx|gtx)(?=\d)", r"\1 ", name).lower()))
    named = [gpu for gpu in known_gpus() if words <= {*gpu.name.lower().split()}]
    if not named and (known := known_gpu(name)):
        named = [known]
    own = [gpu for gpu in named if gpu.memory == "own"]
    return sorted(own, key=lambda gpu: gpu.memory_gb)
