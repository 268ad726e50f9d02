"""Where the time of an arm goes, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple


class Operation(NamedTuple):
    """An operator, or a kernel of a GPU: all calls of it together, and their share of all operations' time."""

    name: str
    num_calls: int
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Profile:
    """An arm under torch's profiler, which slows everything down.

    Attributes:
        arm: its name.
        device: whose time it is. Operators run on a CPU, and kernels on a GPU.
        operations: those that took most of it, the longest first.
        trace: a file for https://ui.perfetto.dev.
    """

    arm: str
    device: Literal["CPU", "GPU"]
    num_tokens: int
    num_iterations: int
    operations: tuple[Operation, ...]
    trace: Path
