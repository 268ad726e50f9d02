"""How often draft tokens were accepted: the counts behind every acceptance figure, as vLLM and AIPerf define them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Acceptance:
    """Counts of iterations by (tokens proposed, tokens accepted). Sums of these are counts again."""

    iterations: Counter[tuple[int, int]] = field(default_factory=Counter)

    @classmethod
    def of(cls, outcomes: Iterable[tuple[int, int]]) -> Acceptance:
        """From one (num_proposed, num_accepted) an iteration and row; iterations that proposed nothing do not count."""
        return cls(Counter(outcome for outcome in outcomes if outcome[0] > 0))

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.iterations + other.iterations)

    @property
    def num_iterations(self) -> int:
        return sum(self.iterations.values())

    @property
    def num_proposed(self) -> int:
        return sum(proposed * times for (proposed, _), times in self.iterations.items())

    @property
    def num_accepted(self) -> int:
        return sum(accepted * times for (_, accepted), times in self.iterations.items())

    @property
    def num_tested(self) -> int:
        """Draft tokens that verification looked at: the accepted ones and the first rejected one of an iteration."""
        return sum(min(accepted + 1, proposed) * times for (proposed, accepted), times in self.iterations.items())

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed."""
        return _ratio(self.num_accepted, self.num_proposed)

    @property
    def conditional_acceptance_rate(self) -> float | None:
        """Accepted / tested: alpha of Leviathan et al. 2023."""
        return _ratio(self.num_accepted, self.num_tested)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens an iteration yields: 1 + accepted / iterations, the recovered or bonus token counted."""
        accepted = _ratio(self.num_accepted, self.num_iterations)
        return None if accepted is None else 1 + accepted

    @property
    def mean_proposed(self) -> float | None:
        """Draft tokens an iteration; K, or a little less where the end of a generation needed fewer."""
        return _ratio(self.num_proposed, self.num_iterations)

    @property
    def by_position(self) -> list[float | None]:
        """Accepted / tested at the first, second, ... draft position."""
        longest = max((proposed for proposed, _ in self.iterations), default=0)
        rates = []
        for position in range(longest):
            tested = sum(
                n for (proposed, accepted), n in self.iterations.items() if position < min(accepted + 1, proposed)
            )
            accepted_here = sum(n for (_, accepted), n in self.iterations.items() if position < accepted)
            rates.append(_ratio(accepted_here, tested))
        return rates

    @property
    def histogram(self) -> list[int]:
        """Iterations in which 0, 1, ... draft tokens were accepted."""
        longest = max((proposed for proposed, _ in self.iterations), default=-1)
        counts = [0] * (longest + 1)
        for (_, accepted), times in self.iterations.items():
            counts[accepted] += times
        return counts


def predicted_speedup(mean_acceptance_length: float, draft_ms: float, verify_ms: float, target_step_ms: float) -> float:
    """What theory predicts: tokens an iteration over its cost in target steps.

    This is mean_acceptance_length / (K c + v) of Leviathan et al. 2023, theorem 3.8, with the cost of verifying K + 1
    tokens measured (v) instead of taken as one target step.

    Args:
        draft_ms: drafting in one iteration, all K steps.
        verify_ms: the target's forward pass over K + 1 tokens.
        target_step_ms: the target's forward pass over one token.
    """
    return mean_acceptance_length * target_step_ms / (draft_ms + verify_ms)


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
