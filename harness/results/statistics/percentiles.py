"""Percentiles of the times of a server's requests, in the columns of a row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

PERCENTILES = (50, 90, 95, 99)


def percentile_columns(**series: Iterable[float | None]) -> dict[str, float | None]:
    """`<name>_p50_ms` and so on of each series of milliseconds; None for one without values."""
    columns: dict[str, float | None] = {}
    for name, times in series.items():
        known = [time for time in times if time is not None]
        for share in PERCENTILES:
            value = float(np.percentile(known, share)) if known else None
            columns[f"{name}_p{share}_ms"] = value
    return columns
