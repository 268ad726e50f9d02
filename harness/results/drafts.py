"""Counts of draft tokens, of one answer or of many, as one value from which all figures of acceptance follow.

The figures are defined as in vLLM and AIPerf. This file also defines the columns of such counts, and the figures that
servers print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple

from harness.results.row import pooled
from harness.results.schema import RunRow

Numbers = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Counts over iterations, which can be added with `+`.

    A count that its source does not report is None; every sum that contains this count is None, too.

    For example, an answer takes three iterations. The first drafts 4 tokens, of which 2 are accepted. The second drafts
    4 tokens, which are all accepted. The third drafts nothing:

        Drafts.of([(4, 2), (4, 4), (0, 0)]).columns()
            acceptance_rate                    6 / 8
            mean_acceptance_length             (2 + 6) / 2 = 4
            tokens_per_iteration               (3 + 6) / 3 = 3
            acceptance_by_position             [2/2, 2/2, 1/2, 1/1]
            marginal_acceptance_by_position    [2/2, 2/2, 1/2, 1/2]

    Attributes:
        answers: number of answers that report anything about drafts. If it is 0, nothing is known. If only some answers
            report drafts, the others count as having drafted nothing, because llama.cpp leaves zeros out.
        decoded: number of tokens that iterations decided: all tokens except the first of each answer.
        iterations: number of all iterations, including those that drafted nothing.
        drafting: number of iterations that drafted at least one token.
        proposed, accepted: numbers of draft tokens.
        accepted_at, tested_at: for each position, from 0, the number of draft tokens that were accepted, or tested. A
            draft token is tested if all draft tokens before it were accepted.
        k: mean number of draft tokens per iteration that drafted, if it is the same in all answers; nan if they differ,
            and 0 if nothing was drafted. It is only read if `tested_at` is None.
    """

    answers: int = 0
    decoded: float | None = 0
    iterations: float | None = 0
    drafting: float | None = 0
    proposed: float | None = 0
    accepted: float | None = 0
    accepted_at: Numbers | None = ()
    tested_at: Numbers | None = ()
    k: float = 0

    @classmethod
    def total(cls, counts: Iterable[Drafts]) -> Drafts:
        """The sum of the counts."""
        return sum(counts, cls())

    @classmethod
    def of(cls, outcomes: Iterable[Sequence[int]], decoded: int | None = None) -> Drafts:
        """The counts of one answer, from pairs (num_proposed, num_accepted), one for each iteration.

        Args:
            decoded: number of tokens that the iterations decided; None for one token per iteration, plus the accepted
                ones.
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
            # All accepted tokens and the first rejected token are tested.
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
    def tested(self) -> Numbers | None:
        """`tested_at`; if it is not known, computed from the other counts; None if these do not determine it.

        If only the mean number of draft tokens per iteration is known, and it is the same whole number in all answers,
        every iteration is assumed to have drafted this number. For example, 10 iterations drafted 3 tokens each, and 7,
        4 and 1 draft tokens were accepted by position: then [10, 7, 4] draft tokens were tested.
        """
        accepted_at, drafting = self.accepted_at, self.drafting
        # `self.k % 1` is also true for nan.
        if self.tested_at is not None or accepted_at is None or drafting is None or self.k % 1:
            return self.tested_at
        if sum(number > 0 for number in accepted_at) > self.k:
            return None
        return [drafting, *accepted_at, *[0] * int(self.k)][: int(self.k)]

    @property
    def longest(self) -> int:
        """The most draft tokens of an iteration, as far as the counts show: the number of positions, but at least the
        mean over the iterations that drafted (or over all, if their number is unknown), rounded up; 0 if neither is
        known.
        """
        if self.tested is not None:
            return len(self.tested)
        mean = (self.proposed or 0) / (self.drafting or self.iterations or math.inf)
        return max(len(self.accepted_at or ()), math.ceil(mean))

    @property
    def histogram(self) -> list[int] | None:
        """Of the iterations that drafted, how many accepted 0, 1, ... tokens; None if this is not known, or if no
        iteration drafted.
        """
        if not self.drafting or self.accepted_at is None:
            return None
        reached = [self.drafting, *self.accepted_at, 0]
        return [round(here - further) for here, further in pairwise(reached)]

    def count_columns(self) -> dict[str, Any]:
        """The counts as columns of a row (`DraftColumns`), by name, without the histogram; all None if no answer
        reports anything about drafts.
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
        """The rates (columns of `measuring.figures.acceptance`), by name; None for a rate that the counts do not
        determine.
        """
        is_known = self.answers > 0
        tokens = _ratio(self.decoded, self.iterations) if is_known else None
        accepted_per_draft = _ratio(self.accepted, self.drafting)
        tested = self.tested
        accepted_at = [*(self.accepted_at or ())]
        # Both lists get the same length; at further positions, nothing was accepted.
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
            # At least 1, because every iteration decides a token; counters of a server may say otherwise.
            "tokens_per_iteration": max(1.0, tokens) if tokens else None,
            "acceptance_by_position": _rounded(map(_ratio, accepted_at, tested or ())),
            "marginal_acceptance_by_position": _rounded(marginal),
            "acceptance_histogram": self.histogram,
        }


_COUNTS = [entry.name for entry in fields(Drafts) if entry.name != "k"]
# The counts of an answer whose server reported impossible counts: all are unknown.
UNKNOWN = Drafts(answers=1, k=math.nan, **{name: None for name in _COUNTS if name != "answers"})


@dataclass(frozen=True, kw_only=True)
class DraftColumns:
    """Counts of draft tokens, for an answer or for an arm."""

    num_iterations: int | None = pooled("sum", "iterations, including those that proposed nothing")
    num_drafting: int | None = pooled("sum", "iterations that proposed at least one token")
    num_proposed: int | None = pooled("sum", "draft tokens", "tokens")
    num_accepted: int | None = pooled("sum", "accepted draft tokens", "tokens")
    tested_by_position: list[int] | None = pooled(
        "sum",
        "draft tokens at each position that were tested: all draft tokens before them were accepted",
    )
    acceptance_histogram: list[int] | None = pooled(
        "sum", "iterations with 0, 1, ... accepted draft tokens"
    )
    impossible_counts: str | None = pooled(
        "same",
        "impossible counts of the server, in its words; no figure is computed from them",
    )

    @property
    def drafts(self) -> Drafts:
        """The counts as one value.

        Rows of older versions contain only a histogram and rates; most counts are computed from these.
        """
        # Every kind of row has `num_decoded` and `acceptance_rate`, and those that older versions wrote
        # `mean_proposed`.
        row: Any = self
        if self.impossible_counts:
            return UNKNOWN
        decoded, iterations = row.num_decoded, self.num_iterations
        drafting, proposed, accepted = self.num_drafting, self.num_proposed, self.num_accepted
        histogram, rate = self.acceptance_histogram or [], row.acceptance_rate
        # Nothing is known about drafts: each token counts as decided by an iteration of its own.
        if iterations is None and proposed is None and rate is None:
            return Drafts(decoded=decoded, iterations=decoded)
        # An older row.
        if histogram and proposed is None:
            drafting, accepted = sum(histogram), sum(positions(histogram))
            proposed = round(drafting * (row.mean_proposed or 0))
        # Only the iterations are known: nothing was drafted. (SGLang's counters always have the number of accepted
        # tokens, even if it is 0, so their rows are not meant here.)
        if proposed is None and rate is None and not drafting and accepted is None:
            return Drafts(answers=1, decoded=decoded, iterations=iterations)
        return Drafts(
            answers=1,
            decoded=decoded,
            iterations=iterations,
            drafting=drafting,
            proposed=proposed,
            accepted=accepted,
            # Without a histogram, the positions are known only if nothing was accepted: then there are none.
            accepted_at=positions(histogram) if histogram or not accepted else None,
            tested_at=self.tested_by_position,
            k=(math.nan if proposed is None else proposed / drafting) if drafting else 0,
        )


def positions(histogram: Sequence[int]) -> list[int]:
    """From a histogram (how many iterations accepted 0, 1, 2, ... tokens), compute how many iterations accepted the
    first draft token, the second, and so on.

    For example, [2, 1, 3] gives [4, 3]: 4 iterations accepted a first token, and 3 of these also a second token.
    """
    reached = [*accumulate(reversed(histogram))]
    # `[5]`, 5 iterations that accepted nothing, gives `[0]`: an empty list would mean that no position is reported.
    return reached[-2::-1] or [0] * len(histogram)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient; None if a number is not known, or if the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


def _rounded(rates: Iterable[float | None]) -> list[float | None] | None:
    """The rates, rounded to four decimals; None if there are no rates."""
    return [rate if rate is None else round(rate, 4) for rate in rates] or None


class Printed(NamedTuple):
    """A figure that a server program prints.

    Attributes:
        program: the first word of the column `server` for this program.
        name: the name under which the program prints the figure.
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
    """The figures of a row as its server would print them, by the server's names for them; {} if the server's program
    is not one of `PRINTED`.
    """
    figures = {}
    for printed in PRINTED:
        value = getattr(row, printed.column, None)
        if value is not None and (row.server or "").startswith(printed.program):
            numbers = value if isinstance(value, list) else [value]
            figures[printed.name] = ", ".join(f"{number:{printed.form}}" for number in numbers)
    return figures
