"""Counts of draft tokens, of one answer or of many, as one value from which all figures of acceptance follow.

The figures are defined as vLLM and AIPerf define them. The file also has the columns of such counts, and the figures
that servers print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple

from harness.results.row import pooled
from harness.results.schema import RunRow

Counts = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Counts over iterations, which can be added with `+`. None is a count that its source does not know; any sum with
    it is None, too.

    For example, three iterations: the first drafts 4 tokens, of which 2 are accepted, the second 4, all accepted, and
    the third drafts nothing:

        Drafts.of([(4, 2), (4, 4), (0, 0)]).columns()
            acceptance_rate 6 / 8, mean_acceptance_length 4 = (2 + 6) / 2, tokens_per_iteration 3 = 9 / 3
            acceptance_by_position [1, 1, 1/2, 1], marginal_acceptance_by_position [1, 1, 1/2, 1/2]

    Attributes:
        answers: number of answers that report anything about drafts. If some answers report drafts, the others drafted
            nothing, because llama.cpp leaves zeros out. If none does, nothing is known.
        decoded: number of tokens that iterations decided, which are all tokens except the first of each answer.
        iterations: all iterations, including those that drafted nothing.
        drafting: iterations that drafted something.
        proposed, accepted: draft tokens.
        accepted_at, tested_at: how many draft tokens were accepted, or tested, at each position, from 0. A draft token
            is tested if all those before it were accepted.
        k: mean number of draft tokens per iteration that drafted, if it is the same in all answers; nan if they differ.
    """

    answers: int = 0
    decoded: float | None = 0
    iterations: float | None = 0
    drafting: float | None = 0
    proposed: float | None = 0
    accepted: float | None = 0
    accepted_at: Counts | None = ()
    tested_at: Counts | None = ()
    k: float = 0

    @classmethod
    def of(cls, outcomes: Iterable[Sequence[int]], decoded: int | None = None) -> Drafts:
        """The counts of one answer, from (num_proposed, num_accepted) of each iteration.

        Args:
            decoded: number of tokens that the iterations decided; None for one each, plus the accepted tokens.
        """
        pairs = [*outcomes]
        drafting = [pair for pair in pairs if pair[0]]
        accepted = sum(accepted for _, accepted in drafting)
        places = range(max((proposed for proposed, _ in drafting), default=0))
        return cls(
            answers=1 if pairs else 0,
            decoded=len(pairs) + accepted if decoded is None else decoded,
            iterations=len(pairs),
            drafting=len(drafting),
            proposed=sum(proposed for proposed, _ in drafting),
            accepted=accepted,
            accepted_at=[sum(place < number for _, number in drafting) for place in places],
            # All accepted tokens are tested, and the first rejected one.
            tested_at=[
                sum(place < min(number + 1, proposed) for proposed, number in drafting)
                for place in places
            ],
        )

    def __add__(self, other: Drafts) -> Drafts:
        sums: dict[str, Any] = {}
        for name in _COUNTS:
            first, second = getattr(self, name), getattr(other, name)
            if first is None or second is None:
                sums[name] = None
            elif name.endswith("_at"):
                sums[name] = [*map(sum, zip_longest(first, second, fillvalue=0))]
            else:
                sums[name] = first + second
        means = {part.k for part in (self, other) if part.proposed != 0}
        k = means.pop() if len(means) == 1 else math.nan if means else 0
        return Drafts(**sums, k=k)

    @property
    def tested(self) -> Counts | None:
        """`tested_at`, or what follows from the other counts; None if nothing does.

        If only the mean number of draft tokens is known, and it is the same whole number in all answers, then every
        iteration is taken to have drafted that many.
        """
        accepted_at, drafting = self.accepted_at, self.drafting
        if self.tested_at is not None or accepted_at is None or drafting is None or self.k % 1:
            return self.tested_at
        if math.isnan(self.k) or sum(number > 0 for number in accepted_at) > self.k:
            return None
        return [drafting, *accepted_at, *[0] * int(self.k)][: int(self.k)]

    @property
    def longest(self) -> int:
        """The most draft tokens of an iteration: the number of positions, or else the rounded mean; 0 if neither is
        known.
        """
        if self.tested is not None:
            return len(self.tested)
        return math.ceil((self.proposed or 0) / (self.iterations or math.inf))

    @property
    def histogram(self) -> list[int] | None:
        """How many of the iterations that drafted accepted 0, 1, ... tokens; None if that is not known, or none
        drafted.
        """
        if not self.drafting or self.accepted_at is None:
            return None
        reached = [self.drafting, *self.accepted_at, 0]
        return [round(here - further) for here, further in pairwise(reached)]

    def counts(self) -> dict[str, Any]:
        """The counts as columns of a row (`DraftColumns`), by name, without the histogram; all None if no answer
        reports anything.
        """
        numbers = {
            "num_decoded": self.decoded,
            "num_iterations": self.iterations,
            "num_drafting": self.drafting,
            "num_proposed": self.proposed,
            "num_accepted": self.accepted,
        }
        columns: dict[str, Any] = {
            name: None if number is None or not self.answers else round(number)
            for name, number in numbers.items()
        }
        tested_at = self.tested_at if self.answers else None
        columns["tested_by_position"] = tested_at and [round(number) for number in tested_at]
        return columns

    def columns(self) -> dict[str, Any]:
        """The rates (`AcceptanceFigures`), by name; None for those that do not follow from the known counts."""
        is_known = self.answers > 0
        tokens = _ratio(self.decoded, self.iterations) if is_known else None
        accepted_per_draft = _ratio(self.accepted, self.drafting)
        tested = self.tested
        accepted_at = [*(self.accepted_at or ())]
        if tested is not None:
            accepted_at = [*accepted_at, *[0] * len(tested)][: len(tested)]
        marginal = [_ratio(number, self.drafting) for number in accepted_at if self.drafting]
        return {
            "acceptance_rate": _ratio(self.accepted, self.proposed),
            "conditional_acceptance_rate": _ratio(self.accepted, sum(tested) if tested else None),
            "mean_acceptance_length": None
            if accepted_per_draft is None
            else 1 + accepted_per_draft,
            "mean_proposed": _ratio(self.proposed, self.drafting),
            "mean_num_draft_tokens": _ratio(self.proposed, self.iterations) if is_known else None,
            "tokens_per_iteration": max(1.0, tokens) if tokens else None,
            "acceptance_by_position": _rounded(map(_ratio, accepted_at, tested or ())),
            "marginal_acceptance_by_position": _rounded(marginal),
            "acceptance_histogram": self.histogram,
        }


_COUNTS = [entry.name for entry in fields(Drafts) if entry.name != "k"]
# The counts of an answer whose server reported impossible ones: nothing about them is known.
UNKNOWN = Drafts(answers=1, k=math.nan, **{name: None for name in _COUNTS if name != "answers"})


@dataclass(frozen=True, kw_only=True)
class DraftColumns:
    """Counts of the draft tokens of an answer, or of an arm."""

    num_iterations: int | None = pooled("sum", "iterations, also those that proposed nothing")
    num_drafting: int | None = pooled("sum", "iterations that proposed something")
    num_proposed: int | None = pooled("sum", "draft tokens", "tokens")
    num_accepted: int | None = pooled("sum", "accepted draft tokens", "tokens")
    tested_by_position: list[int] | None = pooled(
        "sum", "draft tokens at each position that were tested: those before them were accepted"
    )
    acceptance_histogram: list[int] | None = pooled(
        "sum", "iterations with 0, 1, ... accepted draft tokens"
    )
    impossible_counts: str | None = pooled(
        "same",
        "counts of the server that cannot be true, with its words; no figure follows from them",
    )

    @property
    def drafts(self) -> Drafts:
        """The counts as one value.

        Rows of older versions hold only a histogram and rates, from which most of the counts follow.
        """
        row: Any = self
        if self.impossible_counts:
            return UNKNOWN
        decoded, iterations = row.num_decoded, self.num_iterations
        drafting, proposed, accepted = self.num_drafting, self.num_proposed, self.num_accepted
        histogram, rate = self.acceptance_histogram or [], row.acceptance_rate
        if iterations is None and proposed is None and rate is None:
            return Drafts(decoded=decoded, iterations=decoded)
        if histogram and proposed is None:
            drafting, accepted = sum(histogram), sum(positions(histogram))
            proposed = round(drafting * (row.mean_proposed or 0))
        is_idle = iterations is not None and proposed is None and rate is None
        return Drafts(
            answers=1,
            decoded=decoded,
            iterations=iterations,
            drafting=0 if is_idle else drafting,
            proposed=0 if is_idle else proposed,
            accepted=0 if is_idle else accepted,
            accepted_at=positions(histogram) if histogram or not accepted else None,
            tested_at=() if is_idle else self.tested_by_position,
            k=(proposed or 0) / drafting if drafting else 0,
        )


def positions(histogram: Sequence[int]) -> list[int]:
    """How many iterations accepted the first draft token, the second, ..., from how many accepted 0, 1, 2, ... tokens.

    For example, [2, 1, 3] gives [4, 3]: 4 iterations accepted a first token, and 3 of these a second one.
    """
    reached = [*accumulate(reversed(histogram))]
    # If no iteration accepted anything, one position with 0.
    return reached[-2::-1] or [0] * len(histogram)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def _rounded(rates: Iterable[float | None]) -> list[float | None] | None:
    """The rates with four decimals; None without rates."""
    return [rate if rate is None else round(rate, 4) for rate in rates] or None


class Rejection(NamedTuple):
    """A draft token that the target rejected, at a position of the new text that counts from 0.

    Both probabilities are of the rejected token; they are None if the engine does not report them.
    """

    position: int
    rejected: str
    target_probability: float | None
    draft_probability: float | None
    replacement: str


class Printed(NamedTuple):
    """A figure that a server program prints.

    Attributes:
        program: the first word of the column `server` for this program.
        name: the figure's name, in the program's words.
        column: our column that is computed in the same way (`docs/counted.md`).
        form: the format of each number.
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
    # SGLang divides by all of its verifications, including those without a draft.
    Printed("SGLang", "accept len", "tokens_per_iteration", ".2f"),
    Printed("TensorRT-LLM", "acceptance_length", "mean_acceptance_length", ".2f"),
)


def as_printed(row: RunRow) -> dict[str, str]:
    """The figures of a row as its server would print them, by the server's names; empty if its program is not known."""
    figures = {}
    for printed in PRINTED:
        value = getattr(row, printed.column, None)
        if value is not None and (row.server or "").startswith(printed.program):
            numbers = value if isinstance(value, list) else [value]
            figures[printed.name] = ", ".join(f"{number:{printed.form}}" for number in numbers)
    return figures
