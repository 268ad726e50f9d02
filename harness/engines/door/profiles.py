"""Where the time of an arm goes on a GPU, kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Kernel(NamedTuple):
    """All calls of a kernel together, and their share of all kernels' time."""

    name: str
    num_calls: int
    milliseconds: float
    share: float


class Profile(NamedTuple):
    """An arm under torch's profiler, which slows everything down.

    Attributes:
        arm: its name.
        num_iterations: behind the pass over the prompt.
        kernels: those that took most of the time, the longest first.
        trace: a file for https://ui.perfetto.dev.
    """

    arm: str
    num_tokens: int
    num_iterations: int
    kernels: tuple[Kernel, ...]
    trace: Path
