"""How long a run will take, and a word where nothing is answered for long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness.config.machine import num_usable_cores

# Seconds of silence after which something is said, and of a run whose length is said before.
SILENT_S = 60.0
# Times the usual time of a question that count as silence.
_MANY_TIMES = 5.0


class Pace:
    """Follows the questions of a run. A thread that sleeps says where one takes long.

    Args:
        num_questions: of the run.
        say: gets lines for the user.
    """

    def __init__(self, num_questions: int, say: Callable[[str], None]) -> None:
        self._num_questions = num_questions
        self._say = say
        self._seconds: list[float] = []
        self._began = time.monotonic()
        self._timer = self._waiting()

    def answered(self) -> None:
        """Note that the next question has been answered by all arms."""
        self._timer.cancel()
        now = time.monotonic()
        self._seconds.append(now - self._began)
        self._began = now
        # The first one comes with the warm-up.
        if len(self._seconds) == 2:
            self._estimate()
        self._timer = self._waiting()

    def close(self) -> None:
        """Stop following."""
        self._timer.cancel()

    @property
    def _usual_s(self) -> float | None:
        later = self._seconds[1:]
        return sum(later) / len(later) if later else None

    def _estimate(self) -> None:
        left = (self._usual_s or 0.0) * (self._num_questions - len(self._seconds))
        if left > SILENT_S:
            self._say(f"measuring takes about {in_words(left)} more")

    def _waiting(self) -> threading.Timer:
        patience = max(SILENT_S, _MANY_TIMES * (self._usual_s or 0.0))
        timer = threading.Timer(patience, self._tell, (patience,))
        timer.daemon = True
        timer.start()
        return timer

    def _tell(self, patience: float) -> None:
        usual = self._usual_s
        number = len(self._seconds) + 1
        begins = (
            f"question {number} of {self._num_questions} is not answered after {in_words(patience)}"
        )
        if usual is not None:
            begins += f", many times its estimate of {in_words(usual)}"
        self._say(f"{begins} {_load()}".rstrip())


@contextmanager
def pace(num_questions: int, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Follow a run; yields the function that is called after each question."""
    following = Pace(num_questions, say)
    try:
        yield following.answered
    finally:
        following.close()


def in_words(seconds: float) -> str:
    """`40 s`, `12 minutes`, `3.5 hours`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def _load() -> str:
    """The load of the machine, in words; empty where the system does not tell."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return ""
    return f"(load {load:.1f} on {num_usable_cores()} cores)"
