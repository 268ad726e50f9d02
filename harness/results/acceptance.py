"""How often draft tokens were accepted: the counts behind every acceptance figure, as vLLM and AIPerf define them, and
what servers print of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from harness.results.schema import RunRow


@dataclass(frozen=True)
class Acceptance:
    """Counts of iterations by (tokens proposed, tokens accepted). Sums of these are counts again.

    For example three iterations, of which the second accepted all and the last proposed nothing:

        Acceptance.of([(4, 2), (4, 4), (0, 0)])
            num_iterations 2, num_proposed 8, num_accepted 6
            mean_acceptance_length 4 = (2 + 6) / 2, tokens_per_iteration 3 = (3 + 6) / 3
            conditional_rates [1, 1, 1/2, 1], marginal_rates [1, 1, 1/2, 1/2]
    """

    iterations: Counter[tuple[int, int]] = field(default_factory=Counter)

    @classmethod
    def of(cls, outcomes: Iterable[Sequence[int]]) -> Acceptance:
        """From [num_proposed, num_accepted] of each iteration and row.

        Those that proposed nothing count in `tokens_per_iteration` and `mean_num_draft_tokens` alone.
        """
        return cls(Counter((proposed, accepted) for proposed, accepted in outcomes))

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.iterations + other.iterations)

    @property
    def num_iterations(self) -> int:
        return sum(times for (proposed, _), times in self.iterations.items() if proposed)

    @property
    def num_proposed(self) -> int:
        return sum(proposed * times for (proposed, _), times in self.iterations.items())

    @property
    def num_accepted(self) -> int:
        return sum(accepted * times for (_, accepted), times in self.iterations.items())

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(self.num_accepted, self.num_proposed)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per iteration: 1 + accepted / iterations, the recovered or bonus token counted."""
        return _ratio(self.num_iterations + self.num_accepted, self.num_iterations)

    @property
    def tokens_per_iteration(self) -> float | None:
        """The mean acceptance length with the iterations that proposed nothing."""
        return _ratio(self.iterations.total() + self.num_accepted, self.iterations.total())

    @property
    def num_places(self) -> int:
        """Draft tokens of the longest proposal."""
        return max((proposed for proposed, _ in self.iterations), default=0)

    @property
    def conditional_rates(self) -> list[float | None]:
        """Accepted / tested at each draft position: how often a token is accepted if those before it were."""
        return [
            _ratio(self.num_accepted_at(index), self.num_tested_at(index))
            for index in range(self.num_places)
        ]

    @property
    def marginal_rates(self) -> list[float | None]:
        """Accepted / iterations at each draft position, as vLLM and llama.cpp print it."""
        return [
            _ratio(self.num_accepted_at(index), self.num_iterations)
            for index in range(self.num_places)
        ]

    @property
    def histogram(self) -> list[int]:
        """Iterations that proposed something, by their number of accepted tokens."""
        counts = [0] * (self.num_places + 1)
        for (proposed, accepted), times in self.iterations.items():
            if proposed:
                counts[accepted] += times
        return counts

    def columns(self) -> dict[str, Any]:
        """The fields of `AcceptanceFigures` that counts of iterations give; None where nothing was proposed."""
        num_tested = sum(map(self.num_tested_at, range(self.num_places)))
        return {
            "acceptance_rate": self.acceptance_rate,
            "conditional_acceptance_rate": _ratio(self.num_accepted, num_tested),
            "mean_acceptance_length": self.mean_acceptance_length,
            "mean_proposed": _ratio(self.num_proposed, self.num_iterations),
            "mean_num_draft_tokens": _ratio(self.num_proposed, self.iterations.total()),
            "tokens_per_iteration": self.tokens_per_iteration,
            "acceptance_by_position": _rounded(self.conditional_rates),
            "marginal_acceptance_by_position": _rounded(self.marginal_rates),
            "acceptance_histogram": self.histogram if self.num_places else None,
        }

    def num_accepted_at(self, place: int) -> int:
        """Iterations in which the draft token at this place, from 0, was accepted."""
        return sum(times for (_, accepted), times in self.iterations.items() if place < accepted)

    def num_tested_at(self, place: int) -> int:
        """Iterations that tested the draft token at this place, from 0.

        Verification looks at the accepted tokens and the first rejected one.
        """
        return sum(
            times
            for (proposed, accepted), times in self.iterations.items()
            if place < min(accepted + 1, proposed)
        )


class Rejection(NamedTuple):
    """A draft token that the target rejected, at a position in the new text, from 0.

    The probabilities are those of the rejected token; None from an engine that does not report them.
    """

    position: int
    rejected: str
    target_probability: float | None
    draft_probability: float | None
    replacement: str


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _rounded(rates: Sequence[float | None]) -> list[float | None] | None:
    """Four decimals; None for no rates."""
    return [rate if rate is None else round(rate, 4) for rate in rates] or None


class Printed(NamedTuple):
    """A figure that a program prints.

    Attributes:
        program: as the column `server` begins.
        name: the program's words.
        column: ours that is computed alike (`docs/counted.md`).
        form: of each number.
    """

    program: str
    name: str
    column: str
    form: str


PRINTED = (
    Printed("vLLM", "Mean acceptance length", "mean_acceptance_length", ".2f"),
    Printed("vLLM", "Per-position acceptance rate", "marginal_acceptance_by_position", ".3f"),
    Printed("vLLM", "Avg Draft acceptance rate", "acceptance_rate", ".1%"),
    Printed("llama.cpp", "draft acceptance", "acceptance_rate", ".5f"),
    Printed("llama.cpp", "mean len", "mean_acceptance_length", ".2f"),
    # Over all of its verifications.
    Printed("SGLang", "accept len", "tokens_per_iteration", ".2f"),
    Printed("TensorRT-LLM", "acceptance_length", "mean_acceptance_length", ".2f"),
)


def as_printed(row: RunRow) -> dict[str, str]:
    """The figures of a row as its server prints them, by name; empty where its program is not known."""
    figures = {}
    for printed in PRINTED:
        value = getattr(row, printed.column, None)
        if value is not None and (row.server or "").startswith(printed.program):
            numbers = value if isinstance(value, list) else [value]
            figures[printed.name] = ", ".join(f"{number:{printed.form}}" for number in numbers)
    return figures
