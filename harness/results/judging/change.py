"""A figure after a change compared with the same before it, or of two arms on the same questions: better, worse, no
worse than a margin, or it cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.results.judging.statement import Kind, Relation, Statement
from harness.results.schema import RunRow
from harness.results.statistics.comparisons import Comparison, Direction
from harness.results.statistics.interval import Interval
from harness.results.statistics.multiplicity import adjusted_p_values
from harness.results.statistics.proportions import p_value_of_difference

# The chance to be wrong that an adjusted p-value has to stay below.
_LEVEL = 0.05


@dataclass(frozen=True)
class Figure:
    """A figure that is compared.

    Attributes:
        better: the direction that is good: `lower` or `higher`.
        words: the verdict if it is better, and if it is worse: `faster` and `slower`.
        timed: whether it is a time, which differs between identical runs.
        is_share: whether it is a share of answers, whose change is a difference in points; of others
            it is a ratio.
        explains: whether it is one of the parts that a change of speed consists of.
        decides: whether a change for the worse is one of the whole; else it only explains.
    """

    name: str
    better: Direction
    words: tuple[str, str]
    timed: bool = False
    is_share: bool = False
    explains: bool = False
    decides: bool = True


ACCURACY = Figure("accuracy", "higher", ("more accurate", "less accurate"), is_share=True)


def judged_change(
    figure: Figure,
    comparison: Comparison,
    margin: float | None = None,
    why: str = "",
    subject: RunRow | None = None,
    reference: RunRow | None = None,
) -> Statement:
    """The statement about one change, as if no other were read with it.

    Worse and better are read from the interval of 95 %, no worse from that of 90 % (two one-sided tests at 5 %,
    Schuirmann 1987). What is within the margin is no worse, also where it is significantly below.

    Args:
        margin: a change for the worse that is shown to be smaller than this share, or difference, counts as no worse;
            None asks for a difference only.
        why: why nothing can be concluded; empty where nothing is known against it.
        subject, reference: rows after and before; without a reference that of the subject's own regular arm.
    """
    change = comparison.change
    least, most = _gain(figure, change)
    least_of_90, _ = _gain(figure, comparison.one_sided)
    if not change.has_bounds:
        why = why or "no interval"
    kind: Kind = "changed"
    relation: Relation = "open"
    if not why:
        if least > 0:
            relation = "above"
        elif margin is not None and least_of_90 > -margin:
            kind, relation = "margin", "above"
        elif most < 0:
            relation = "below"
    return Statement(kind, relation, change, why, subject, reference, figure=figure.name)


def _gain(figure: Figure, change: Interval) -> Sequence[float]:
    """The bounds of what a change gains: above 0 it is for the better."""
    sign = 1 if figure.better == "higher" else -1
    no_change = 0 if figure.is_share else 1
    return sorted(sign * (bound - no_change) for bound in (change.low, change.high))


def judged_together(
    statements: Sequence[Statement], p_values: Sequence[float]
) -> Sequence[Statement]:
    """Statements that are read together: better or worse only where that is significant among all (Benjamini and
    Hochberg).
    """
    family = sum(not math.isnan(p_value) for p_value in p_values)
    judged = []
    for statement, p_value in zip(statements, adjusted_p_values(p_values), strict=True):
        is_difference = statement.kind == "changed" and statement.is_conclusion
        if is_difference and p_value >= _LEVEL:
            why = f"not significant among {family} comparisons"
            statement = replace(statement, relation="open", why=why)
        judged.append(replace(statement, family=max(1, family)))
    return judged


def judged_differences(rows: Sequence[Any]) -> Sequence[Statement]:
    """The statements about the accuracy of both arms, of the rows of `eval` that are read together."""
    statements = []
    p_values = []
    for row in rows:
        difference = row.difference or Interval()
        p_values.append(p_value_of_difference(difference))
        why = "" if row.difference else "only one arm answered"
        if row.status == "failed":
            why = str(row.error)
        comparison = Comparison(difference, Interval(), p_values[-1])
        statements.append(judged_change(ACCURACY, comparison, why=why, subject=row))
    return judged_together(statements, p_values)
