"""Columns about acceptance that requests of an arm give: from their iterations, else from a server's totals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
