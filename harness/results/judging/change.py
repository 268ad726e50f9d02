"""The accuracy of the speculative arm against the regular one on the same questions: better, worse, or it cannot be
told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.results.judging.statement import Statement
from harness.results.statistics.interval import Interval
from harness.results.statistics.multiplicity import adjusted_p_values
from harness.results.statistics.proportions import p_value_of_difference

# The chance to be wrong that an adjusted p-value has to stay below.
_LEVEL = 0.05
# Of rows that do not say which difference matters.
_MARGIN = 0.05


def judged_differences(rows: Sequence[Any]) -> Sequence[Statement]:
    """The statements about the accuracy of both arms, of the rows of `eval` that are read together.

    Better or worse only where that is significant among all (Benjamini and Hochberg), and no difference only where the
    interval excludes one of the margin.
    """
    differences = [row.difference or Interval() for row in rows]
    p_values = [p_value_of_difference(difference) for difference in differences]
    family = sum(not math.isnan(p_value) for p_value in p_values)
    statements = []
    for row, difference, p_value in zip(
        rows, differences, adjusted_p_values(p_values), strict=True
    ):
        why = "" if row.difference else "only one arm answered"
        if row.status == "failed":
            why = str(row.error)
        statement = Statement.ordered(
            "changed",
            difference,
            why,
            limit=0.0,
            subject=row,
            family=max(1, family),
            figure="accuracy",
        )
        if statement.is_conclusion and p_value >= _LEVEL:
            why = f"not significant among {family} comparisons"
            statement = replace(statement, relation="open", why=why)
        margin = row.margin or _MARGIN
        if statement.is_judged_open and max(-difference.low, difference.high) > margin:
            why = f"a difference of {100 * margin:g} points is not excluded"
            statement = replace(statement, why=why)
        statements.append(statement)
    return statements
