"""Whether an engine accepts what the weights of its models do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from harness.results.judging.statement import Relation, Statement
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.statistics.interval import Interval

Health = Literal["as its weights say", "accepts less", "accepts more", "other texts", "cannot tell"]

_RELATIONS: Mapping[str, Relation] = {"accepts more": "above", "accepts less": "below"}


def health_of(
    served: float | None, weights: Interval, *, is_counted: bool, is_likely: bool
) -> Health:
    """Whether an engine accepted what the weights of its models do.

    Args:
        served: its tokens per iteration; None where nothing shows them.
        weights: those of its weights, on the same texts.
        is_counted: whether it reported its iterations.
        is_likely: whether its texts are as likely as the model's own.
    """
    if not is_likely:
        return "other texts"
    if served is not None and not weights.excludes(served):
        return "as its weights say"
    if served is None or not is_counted:
        return "cannot tell"
    return "accepts less" if served < weights.estimate else "accepts more"


def why_unknown(row: AcceptanceRow) -> str:
    """Why nothing is known of what the engine of a row accepts; empty where it is."""
    if row.health == "other texts":
        return f"its texts are not {row.model}'s"
    if row.health != "cannot tell":
        return ""
    if row.served_tokens_per_iteration is None:
        return "the engine does not report what it accepted"
    return (
        f"the engine drafts fewer than K={row.num_draft_tokens}, or does not report what it"
        " accepted"
    )


def judged_health(row: Any) -> Statement:
    """The statement about what an engine accepts, with the tokens per iteration of its weights."""
    weights = row.weights_tokens_per_iteration or Interval()
    why = why_unknown(row) or ("" if weights.has_bounds else "no interval")
    relation = "open" if why else _RELATIONS.get(row.health, "open")
    return Statement("health", relation, weights, why, row, figure="tokens per iteration")
