"""A word where nothing is answered for long, which a progress bar does not say."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from harness.config.machine import num_usable_cores

# A silence longer than this is explained.
SILENT_S = 60.0
# A question that usually takes longer is only late after this many times its usual time.
_MANY_TIMES = 5.0


class Pace:
    """Follows the questions of a run. A thread that sleeps says so where one takes long.

    Args:
        num_questions: that are asked one after the other; each may be a batch or a lap of prompts.
        say: gets lines for the user.
    """

    def __init__(self, num_questions: int, say: Callable[[str], None]) -> None:
        self._num_questions = num_questions
        self._say = say
        self._seconds: list[float] = []
        self._began = time.monotonic()
        self._timer = self._start_timer()

    def answered(self) -> None:
        """Note that the next question has been answered by all arms."""
        self._timer.cancel()
        now = time.monotonic()
        self._seconds.append(now - self._began)
        self._began = now
        self._timer = self._start_timer()

    def close(self) -> None:
        """Stop following."""
        self._timer.cancel()

    @property
    def _usual_s(self) -> float | None:
        # The first one comes with the warm-up.
        later = self._seconds[1:]
        return sum(later) / len(later) if later else None

    def _start_timer(self) -> threading.Timer:
        patience = max(SILENT_S, _MANY_TIMES * (self._usual_s or 0.0))
        timer = threading.Timer(patience, self._explain_silence, (patience,))
        timer.daemon = True
        timer.start()
        return timer

    def _explain_silence(self, patience: float) -> None:
        usual = self._usual_s
        number = len(self._seconds) + 1
        waited = in_words(patience)
        sentence = f"question {number} of {self._num_questions} is not answered after {waited}"
        if usual is not None:
            sentence += f", many times its estimate of {in_words(usual)}"
        self._say(f"{sentence} {load_in_words()}".rstrip())


def in_words(seconds: float) -> str:
    """`40 s`, `12 minutes`, `3.5 hours`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def load_in_words() -> str:
    """The load of the machine, in words; empty where the system does not tell."""
    load = load_average()
    return "" if load is None else f"(load {load:.1f} on {num_usable_cores()} cores)"


def load_average() -> float | None:
    """Programs that ran or waited for a core, on average over the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
