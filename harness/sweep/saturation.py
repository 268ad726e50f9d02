"""Jobs that a sweep leaves out, because a smaller load saturates what they would measure: `until_saturated`.

The load is the batch size: the rows that are decoded together, or a server's requests in flight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from harness.config.run import RunSettings
from harness.results.measurement import measurement_digest
from harness.results.schema import RunRow

# The least growth of tokens per second from one load to the next that is worth trying a larger one. Two measurements
# of the same may differ by as much.
LEAST_GROWTH = 0.05

# Tokens per second by arm.
Rates = dict[str, float]


def reached_before(settings: RunSettings, rows: Sequence[RunRow]) -> str | None:
    """Why a job need not be measured; None if it must be.

    It need not if from the second largest to the largest of the smaller loads the throughput of no arm grew by
    `LEAST_GROWTH`. For example, a sweep has measured

        batch_size   regular tokens/s   speculative tokens/s
        1            100                200
        2            150                199
        4            152                203

    Then a job with batch_size=8 is left out.

    Args:
        settings: those of the job.
        rows: of the sweep's jobs so far. Those that differ from this job in more than the load do not count.
    """
    rates_by_load = _rates_of_smaller_loads(settings, rows)
    if len(rates_by_load) < 2:
        return None
    smaller, larger = sorted(rates_by_load)[-2:]
    before = rates_by_load[smaller]
    after = rates_by_load[larger]
    arms = sorted(before.keys() & after.keys())
    growths = [after[arm] / before[arm] - 1 for arm in arms]
    if not arms or max(growths) >= LEAST_GROWTH:
        return None
    rates = ", ".join(f"{arm} {before[arm]:.1f} and {after[arm]:.1f} tokens/s" for arm in arms)
    return f"throughput does not grow from batch_size={smaller} to {larger} ({rates})"


def _rates_of_smaller_loads(settings: Any, rows: Sequence[Any]) -> dict[int, Rates]:
    """Throughput by load, of jobs with the same settings but a smaller load."""
    complete = [row for row in rows if row.status == "ok" and row.batch_size]
    measured = [row for row in complete if row.tokens_per_second]
    loads = {row.batch_size for row in measured if row.batch_size < settings.batch_size}
    rates_by_load: dict[int, Rates] = {}
    for load in loads:
        digest = measurement_digest(dataclasses.replace(settings, batch_size=load))
        rates = {row.arm: row.tokens_per_second for row in measured if row.measurement == digest}
        if rates:
            rates_by_load[load] = rates
    return rates_by_load
