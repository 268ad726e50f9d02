"""Rows as a DataFrame, for Python: what `run` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from harness.results.row import Row


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a DataFrame: the dozen columns that most questions need come first, and empty ones are left out.

    A regular arm has the K of its run, so that `groupby` and `pivot` by K keep both arms.
    """
    import pandas as pd

    from harness.results.schema import CORE_COLUMNS

    whole = pd.DataFrame([row.values() for row in rows]).dropna(axis="columns", how="all")
    if {"run", "arm", "num_draft_tokens"} <= {*whole.columns}:
        # The first one that is no empty cell.
        known_k = whole.groupby("run").num_draft_tokens.transform("first")
        k = whole.num_draft_tokens.mask(whole.arm == "regular", known_k)
        whole["num_draft_tokens"] = k if (k == "auto").any() else k.astype("Int64")
    first = [name for name in CORE_COLUMNS if name in whole.columns]
    return whole[[*first, *whole.columns.difference(first, sort=False)]]
