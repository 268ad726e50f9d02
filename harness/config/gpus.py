"""GPUs on their makers' data sheets, from `gpus.csv`."""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU on its maker's data sheet.

    Attributes:
        pattern: a regular expression found in what torch, the system or a table calls it.
        memory: `own`, or `shared` with the processor.
        memory_gb: as sold; the largest size that is sold under this name.
        bandwidth_gb_s: in 10^9 bytes per second.
    """

    name: str
    pattern: str
    memory: str
    memory_gb: float
    bandwidth_gb_s: float


@functools.cache
def known_gpus() -> tuple[Gpu, ...]:
    """The table in `gpus.csv`."""
    lines = Path(__file__).with_name("gpus.csv").read_text(encoding="utf-8").splitlines()[1:]
    return tuple(
        Gpu(name, pattern, memory, float(size), float(rate))
        for name, pattern, memory, size, rate in csv.reader(lines)
    )


def known_gpu(device_name: str) -> Gpu | None:
    """The first GPU of the table whose pattern is found in `device_name`; None for an unknown one."""
    return next((gpu for gpu in known_gpus() if re.search(gpu.pattern, device_name)), None)


def gpus_named(name: str) -> list[Gpu]:
    """The GPUs of the table with all words of a name, least memory first: `A100`, `h100-sxm`, `RTX4090`; else that
    which the driver calls so, `NVIDIA A100-SXM4-80GB`.
    """
    words = set(re.split(r"[\s_-]+", re.sub(r"(?i)\b(rtx|gtx)(?=\d)", r"\1 ", name).lower()))
    named = [gpu for gpu in known_gpus() if words <= {*gpu.name.lower().split()}]
    if not named and (known := known_gpu(name)):
        named = [known]
    own = [gpu for gpu in named if gpu.memory == "own"]
    return sorted(own, key=lambda gpu: gpu.memory_gb)
