"""A program that two processes run as the ranks of `tensor_parallel`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing

from harness.config.machine import MEETING_FILE

Program = Callable[[int], object]


def run_two_ranks(program: Program, directory: Path, start_method: str = "fork") -> None:
    """Run `program(rank)` in two processes, which meet at a file in the directory. Both must succeed.

    To be spawned, which takes seconds, a program must be a function of a module, or a `partial` of one.
    """
    torch.multiprocessing.start_processes(
        _be_rank, (program, directory / "meeting"), nprocs=2, start_method=start_method
    )


def _be_rank(rank: int, program: Program, meeting: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ[MEETING_FILE] = str(meeting)
    program(rank)
