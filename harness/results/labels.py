"""What must be said wherever a row is shown: that it was not measured on real weights, or not by the real rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def labels(row: Mapping[str, Any]) -> list[str]:
    """`random weights` and `synthetic 0.8`, as far as they apply; none for a real measurement.

    Args:
        row: of any command, as it was written or as it was read; of a version that knew neither, too.
    """
    found = ["random weights"] if row.get("weights") == "random" else []
    bias = row.get("synthetic_acceptance")
    # Without a draft nothing is accepted.
    if bias not in (None, "") and row.get("draft") not in (None, ""):
        found.append(f"synthetic {float(bias):g}")
    return found


def is_real(row: Mapping[str, Any]) -> bool:
    """Whether its figures are those of the models that it names."""
    return not labels(row)
