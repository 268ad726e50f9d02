"""Where the time of an answer goes: seconds of the phases of a loop, by the clock of the device that computes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Phases:
    """Seconds and calls of the phases of a loop; nothing of an engine that does not time them.

    The phases: `forward` is the target's passes after the prompt, one per iteration, each with the
    decision that follows it. `drafting` is the proposals.

    Attributes:
        seconds: of each phase.
        calls: of each phase.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, others: Phases) -> None:
        """Add the phases of another answer."""
        for phase, seconds in others.seconds.items():
            self.seconds[phase] += seconds
        self.calls.update(others.calls)

    def ms_per_iteration(self, phase: str) -> float | None:
        """A phase's milliseconds per iteration; None without such a phase or an iteration."""
        num_iterations = self.calls["forward"]
        if not self.calls[phase] or not num_iterations:
            return None
        return 1000 * self.seconds[phase] / num_iterations
