"""A program that two processes run as the ranks of `tensor_parallel`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from forked import begin_program
from harness.config.machine import MEETING_FILE

Program = Callable[[int], object]


def run_two_ranks(program: Program, directory: Path) -> None:
    """Run `program(rank)` in two processes, which meet at a file in the directory. Both must succeed.

    The program is a function of a module, or a `partial` of one.
    """
    meeting = {MEETING_FILE: str(directory / "meeting"), "WORLD_SIZE": "2"}
    ranks = [
        begin_program(
            partial(program, rank), directory, RANK=str(rank), LOCAL_RANK=str(rank), **meeting
        )
        for rank in range(2)
    ]
    # After the failure of one the other may wait for it.
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.communicate() for rank in ranks]
