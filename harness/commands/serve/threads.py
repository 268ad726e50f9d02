"""How many threads compute answers on a CPU: as many as other programs leave cores free.

Threads of one forward pass wait for each other. With more of them than free cores, each wait lasts
until the system gives the last thread its turn, and a short answer takes seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil
import torch

# Seconds from one choice to the next, and between two lines about a busy machine.
_PERIOD_S = 2.0
_QUIET_S = 60.0


class ThreadChoice:
    """Sets torch's threads, in the thread that computes.

    Args:
        say: gets a line when other programs use the machine.
        most: the number used while no other program computes, and never exceeded.
    """

    def __init__(self, say: Callable[[str], None], most: int) -> None:
        self._say = say
        self._most = most
        self._current = most
        self._num_cores = os.cpu_count() or most
        self._process = psutil.Process()
        self._cores_of_others()
        self._due = time.monotonic() + _PERIOD_S
        self._warned_at = -_QUIET_S

    def choose_if_due(self) -> None:
        """Choose, if the last choice is old enough; called before every iteration."""
        if time.monotonic() >= self._due:
            self.choose()

    def choose(self) -> None:
        """Choose by what has been used since the last choice."""
        self._due = time.monotonic() + _PERIOD_S
        others = self._cores_of_others()
        chosen = max(1, min(self._most, round(self._num_cores - others)))
        if chosen == self._current:
            return
        torch.set_num_threads(chosen)
        now = time.monotonic()
        if chosen < self._current and now - self._warned_at >= _QUIET_S:
            self._warned_at = now
            self._say(
                f"Other programs use {others:.1f} of {self._num_cores} cores: answers are slower, "
                f"computed with {chosen} of {self._most} threads (OMP_NUM_THREADS sets a number)."
            )
        self._current = chosen

    def _cores_of_others(self) -> float:
        """The cores that other programs have used on average since the last call."""
        used = psutil.cpu_percent() / 100 * self._num_cores
        return max(0.0, used - self._process.cpu_percent() / 100)
