"""Judges the answers of a run: whether both arms are equally accurate (`eval`), and whether the texts follow the
target's distribution (`recovery`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from harness.config.amounts import percent
from harness.results.judging.statement import Relation, Statement
from harness.results.row import Row
from harness.results.statistics.drawn_tokens import NOTABLE_EVIDENCE, odds_in_words
from harness.results.statistics.interval import Interval
from harness.results.statistics.multiplicity import adjusted_p_values
from harness.results.statistics.proportions import p_value_of_difference

AnyRow = TypeVar("AnyRow", bound=Row)

# A difference is significant if its adjusted p-value is below this level.
_LEVEL = 0.05
# The difference in accuracy that matters, for rows that state no `margin`.
MARGIN = 0.05
# If rounding moves at least this share of the probability that the shift moves, hardly any number of draws would tell
# the shift from rounding. The share is a choice.
_ROUNDING_OF_SHIFT = 0.5


def rows_over_all_seeds(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Select the rows of `eval` that cover all seeds. Their order is kept: in a run, the regular arm's row
    comes first.
    """
    return [row for row in rows if getattr(row, "seed", None) == "all"]


def judged_differences(rows: Sequence[Any]) -> Sequence[Statement]:
    """Judge the differences in accuracy between the two arms, from rows of `eval` that a reader sees together.

    The relation of a statement (`Statement.relation`) is:

    - above (better) or below (worse): only if the difference is significant among all rows (Benjamini and Hochberg),
      both by its interval and, if the row has its p-value, by McNemar's test;
    - open without a reason, which is shown as "no significant difference": only if the interval excludes every
      difference larger than the margin;
    - open with a reason (`why`): in all other cases. For example, only one arm was measured, or the run failed.

    Args:
        rows: the last row of each run over all seeds (`rows_over_all_seeds`). A row of a run with one arm has no
            `difference`.

    Returns:
        One statement for each row, in the order of the rows.
    """
    differences = [row.difference or Interval() for row in rows]
    p_values = [
        # Without an interval the p-value stays nan, because max() keeps a nan that comes first. A damaged file may
        # hold a p-value above 1.
        max(p_value_of_difference(difference), min(row.mcnemar_p_value or 0.0, 1.0))
        for row, difference in zip(rows, differences, strict=True)
    ]
    # The number of comparisons that the adjustment covers. Rows without an interval were not compared.
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
            among = f" among {family} comparisons" if family > 1 else f", p-value {p_value:.2g}"
            why = f"not significant{among}"
            statement = replace(statement, relation="open", why=why)
        margin = row.margin or MARGIN
        # An open statement without a reason (`is_judged_open`) is shown as "no significant difference". So a reason is
        # set here, unless the interval excludes every difference larger than the margin.
        if statement.is_judged_open and max(-difference.low, difference.high) > margin:
            change = "gain" if -difference.low <= margin else "difference"
            change = "loss" if difference.high <= margin else change
            why = f"a {change} of {100 * margin:g} points is not excluded"
            statement = replace(statement, why=why)
        statements.append(statement)
    return statements


def judged_output(rows: Sequence[Any], findings: str, lossy_by: str = "") -> Statement:
    """Judge whether the output of a run is lossless, lossy or undecided.

    The first of these rules that applies decides:

    1. A run that did not finish is undecided.
    2. If any check found lossy output, the output is lossy.
    3. If a rule or setting is lossy by definition, the output is lossy.
    4. If any check is undecided or has no verdict, or if there is a draft that proposed nothing, the output is
       undecided.
    5. Otherwise the output is lossless.

    Args:
        rows: the rows of one run, one for each check; at least one.
        findings: the figures of the checks, in words: the evidence for a conclusion that does not rest on `lossy_by`.
            Without any evidence, the output is undecided.
        lossy_by: the setting or rule that is lossy by definition; empty for a lossless rule.
    """
    relation, reason = _judged(rows, lossy_by)
    evidence = reason or findings
    if relation == "open" or not evidence:
        why = evidence or "no check was finished"
        return Statement("lossless", "open", why=why, subject=rows[0], figure="output")
    return Statement("lossless", relation, evidence=evidence, subject=rows[0], figure="output")


def _judged(rows: Sequence[Any], lossy_by: str) -> tuple[Relation, str]:
    """The relation, and its reason; the reason is empty if the figures of the checks are the reason."""
    # All rows of a run have the status of the run.
    status = rows[-1].status or "ok"
    if status != "ok":
        return "open", status
    if any(row.verdict == "lossy" for row in rows):
        return "lossy", ""
    if lossy_by:
        return "lossy", f"{lossy_by} is lossy by definition, although these checks do not show it"
    if any(row.verdict is None for row in rows):
        return "open", "a check has no verdict"
    undecided = [row for row in rows if row.verdict == "undecided"]
    for row in undecided:
        if row.check == "reference":
            return "open", str(row.finding)
        if row.num_cut_short:
            return "open", (
                f"{row.num_cut_short} of {row.num_prompts} greedy texts ended before the length that was asked"
                " for, without an end token: the context may be too short, or the server ignores ignore_eos"
            )
        if row.check == "greedy":
            if row.num_tokens == 0:
                return (
                    "open",
                    "no token was compared: the greedy texts are empty, or differ from their first token on",
                )
            return (
                "open",
                "greedy texts differ, and no logits say whether rounding explains it",
            )
    if not undecided and rows[0].draft and rows[0].drafted is False:
        return "open", "nothing was drafted, so these checks only tested regular decoding"
    if not undecided:
        return "lossless", ""
    # Only checks of drawn tokens are left: kernels are undecided only in cases that have returned above.
    weakest = min(undecided, key=lambda row: row.power or 0)
    shift, rounding = weakest.shift or 0.0, weakest.rounding or 0.0
    evidence, num_draws = weakest.evidence or 0.0, weakest.num_draws or 0
    num_needed = max(row.num_draws_needed or 0 for row in rows)
    # No number of draws is known to be enough, and the row has a shift that rounding nearly hides.
    if not num_needed and rounding >= _ROUNDING_OF_SHIFT * shift > 0:
        return "open", (
            f"rounding ({rounding:.2g}) is nearly as large as the shift ({shift:g}) that is to be detected: a larger"
            " shift= can be tested, or the engine in float32"
        )
    advice = "raise num_draws or shift"
    if num_needed:
        advice = f"at least num_draws={num_needed} is needed"
    if evidence >= NOTABLE_EVIDENCE:
        return "open", (
            f"{num_draws:,} drawn tokens are evidence of {odds_in_words(evidence)} against the target's distribution,"
            f" not yet decisive; {advice}"
        )
    return "open", (
        f"{num_draws:,} drawn tokens would detect a shift of {percent(shift)} between parts of their distribution with"
        f" a guaranteed probability of only {percent(weakest.power or 0.0, 1)}; {advice}"
    )
