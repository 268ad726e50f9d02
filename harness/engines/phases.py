"""Where the time of an answer goes: seconds of the phases of a loop, as an engine's stopwatches measure them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Phases:
    """Seconds and calls of the phases of a loop; nothing where no stopwatch ran.

    The phases: `forward` is the target's passes after the prompt, one per iteration, each with the
    decision that follows it. `drafting` is the proposals.

    Attributes:
        seconds: of each phase; `seconds_in_layers` those within its watched layers.
        calls: of each phase.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    seconds_in_layers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, others: Phases) -> None:
        """Add the phases of another answer."""
        for phase, seconds in others.seconds.items():
            self.seconds[phase] += seconds
        for phase, seconds in others.seconds_in_layers.items():
            self.seconds_in_layers[phase] += seconds
        self.calls.update(others.calls)

    def mean_ms(self, phase: str) -> float | None:
        """A phase's milliseconds per iteration; None without such a phase or an iteration."""
        num_iterations = self.calls["forward"]
        if not self.calls[phase] or not num_iterations:
            return None
        return 1000 * self.seconds[phase] / num_iterations

    def share_in_layers(self, phase: str) -> float | None:
        """The share of a phase's time that its watched layers took; None without any.

        On a GPU it is measured by events in the layer's stream, which add no waiting. It includes
        all kernels of the layer, and the gaps between them in which the GPU waits for the host. The
        events take a few microseconds per layer, which count for the phase.
        """
        if not self.seconds_in_layers[phase]:
            return None
        return self.seconds_in_layers[phase] / self.seconds[phase]
