"""Where the time of a generation goes: stopwatches around the phases of a loop, for a pass that is not timed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Stopwatch:
    """Seconds and calls spent in one phase, devices synchronised around each call."""

    synchronize: Callable[[], None]
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self.synchronize()
        started = time.perf_counter()
        result = call(*arguments)
        self.synchronize()
        self.seconds += time.perf_counter() - started
        self.calls += 1
        return result

    @property
    def mean_ms(self) -> float | None:
        return 1000 * self.seconds / self.calls if self.calls else None


class Phases:
    """Where the time of a generation goes, from a separate pass: stopwatches synchronise, the timed run does not.

    `forward` has the target's forward passes after the prompt, one per iteration; `drafting` has the proposals.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.forward, self.drafting = Stopwatch(synchronize), Stopwatch(synchronize)

    @property
    def mean_ms(self) -> tuple[float | None, float | None]:
        """Of a forward pass, and of drafting per iteration."""
        calls = self.forward.calls if self.drafting.calls else 0
        return self.forward.mean_ms, 1000 * self.drafting.seconds / calls if calls else None


class Watched:
    """Another object, one method of which runs under a stopwatch."""

    def __init__(self, watched: Any, method: str, stopwatch: Stopwatch) -> None:
        self._watched, self._method, self._stopwatch = watched, method, stopwatch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._watched, name)
        return functools.partial(self._stopwatch, found) if name == self._method else found
