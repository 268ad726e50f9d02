"""Where the time of a generation goes: stopwatches around the phases of a loop, for a pass that is not timed."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.models.devices import synchronize


class Replacing:
    """Another object, some of whose methods are replaced."""

    def __init__(self, original: Any, **methods: Callable[..., Any]) -> None:
        self._original = original
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Phases:
    """Seconds and calls of each phase, with the devices synchronised around each call: the timed run does not do that.

    `forward` has the target's forward passes after the prompt, one per iteration; `drafting` has the proposals.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._devices = devices
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def watch(self, phase: str, watched: Any, method: str) -> Any:
        """The object, with every call of its method timed as part of a phase."""
        call = getattr(watched, method)

        def timed(*arguments: Any) -> Any:
            synchronize(self._devices)
            started = time.perf_counter()
            result = call(*arguments)
            synchronize(self._devices)
            self.seconds[phase] += time.perf_counter() - started
            self.calls[phase] += 1
            return result

        return Replacing(watched, **{method: timed})

    def mean_ms(self, phase: str) -> float | None:
        """Of an iteration; None where the phase never came."""
        return 1000 * self.seconds[phase] / self.calls["forward"] if self.calls[phase] else None
