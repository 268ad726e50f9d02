"""Engines that misbehave at one K, without torch: what a sweep has to survive. `engine=wicked_engine.py:Killed`."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from harness.engines.record import ENGINES, Opening

FATAL = 7
FILE = Path(__file__)


Simulated: Any = type(ENGINES["simulated"])


class Wicked(Simulated):
    """Answers as the simulated engine does; its runner says how many cores it has."""

    def open(self, opening: Opening) -> Any:
        engine = super().open(opening)
        engine.runner = os.environ["OMP_NUM_THREADS"]
        if opening.settings.decoding.num_draft_tokens == FATAL:
            engine.arms[-1].answer = lambda *_, **__: self.misbehave()
        return engine

    def misbehave(self) -> None:
        raise ZeroDivisionError("a bug in the engine")


class Greedy(Wicked):
    def misbehave(self) -> None:
        bytearray(2**60)


class Killed(Wicked):
    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hanging(Wicked):
    def misbehave(self) -> None:
        Path("hanging").touch()
        time.sleep(3600)
