"""Columns about acceptance that requests of an arm give: from their iterations, else from a server's totals or
counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.engines.counts import Counts
from harness.engines.requests import RequestRecord
from harness.results.acceptance import Acceptance


def acceptance_columns(requests: Iterable[RequestRecord]) -> dict[str, Any]:
    """The columns about acceptance that the figures of these requests give."""
    drafting = [
        request for request in requests if request.outcomes or request.num_drafted is not None
    ]
    if all(request.outcomes for request in drafting):
        outcomes = (outcome for request in drafting for outcome in request.outcomes)
        return Acceptance.of(outcomes).columns()
    num_drafted = sum(request.num_drafted or 0 for request in drafting)
    num_accepted = sum(request.num_accepted or 0 for request in drafting)
    return {"acceptance_rate": num_accepted / num_drafted if num_drafted else None}


def counted_acceptance(counts: Counts, num_requests: int) -> dict[str, Any]:
    """The columns about acceptance that counters give; none where nothing was drafted.

    Args:
        num_requests: answers, whose first tokens come without a verification.
    """
    drafts = counts.drafts
    proposed = counts.proposed
    accepted = counts.accepted
    if accepted is None and drafts and counts.generated is not None:
        # Each verification yields one token besides those that it accepts.
        accepted = max(0.0, counts.generated - num_requests - drafts)
    if accepted is None or not (proposed or drafts):
        return {}
    columns: dict[str, Any] = {"acceptance_source": "metrics"}
    if proposed:
        columns["acceptance_rate"] = accepted / proposed
    if drafts:
        columns["mean_acceptance_length"] = 1 + accepted / drafts
        columns["mean_proposed"] = proposed / drafts if proposed else None
        rates = [number / drafts for _, number in sorted(counts.accepted_at.items())]
        if rates:
            columns["marginal_acceptance_by_position"] = [round(rate, 4) for rate in rates]
    return columns
