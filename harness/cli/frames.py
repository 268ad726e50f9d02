"""Rows as DataFrames, for Python: what `run` returns, and one row for each pair of arms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.config.errors import SettingError

if TYPE_CHECKING:
    import pandas as pd

    from harness.results.row import Row
    from harness.results.runs import Run

# Columns of rows that time both arms of a run.
_NEEDED = {"run", "arm", "ms_per_token", "speedup"}


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a DataFrame: the dozen columns that most questions need come first, and empty ones are left out.

    A regular arm has the K of its run, so that `groupby` and `pivot` by K keep both arms.
    """
    import pandas as pd

    from harness.results.schema import CORE_COLUMNS

    whole = pd.DataFrame([row.values() for row in rows]).dropna(axis="columns", how="all")
    if {"run", "arm", "num_draft_tokens"} <= {*whole.columns}:
        of_run = whole.groupby("run").num_draft_tokens.transform("first")
        k = whole.num_draft_tokens.mask(whole.arm == "regular", of_run)
        is_number = k.map(lambda value: pd.isna(value) or not isinstance(value, str)).all()
        whole["num_draft_tokens"] = k.astype("Int64") if is_number else k
    first = [name for name in CORE_COLUMNS if name in whole.columns]
    return whole[[*first, *whole.columns.difference(first, sort=False)]]


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each run of `latency`, with both of its arms: `pairs(run("latency", "-m", "K=2,4,8"))`.

    Args:
        rows: what `run` returned, or `pandas.read_csv("results/latency.csv")`.

    Returns:
        Columns: `model`, `draft`, `K` (Int64; <NA> where it is `auto`), `regular_ms` and `ms` (per token), `speedup`
        with the ends `low` and `high` of its interval, which covers `covers` (`15 prompts`), `accepted` (the rate),
        `verdict` (`faster`, `slower` or `cannot tell`), `doubts` (sentences), `tokens_per_iteration`, `batch_size`,
        `temperature`, `run`.

    Raises:
        SettingError: rows of another command, whose arms are not timed side by side.
    """
    import pandas as pd

    from harness.commands.command import Command
    from harness.commands.registry import commands
    from harness.results.runs import group
    from harness.results.verdict import verdict_of

    if not set(rows.columns) >= _NEEDED:
        raise SettingError("rows", "must be those of latency, which times both arms")
    command = next(
        one
        for one in commands()
        if isinstance(one, Command) and one.row.columns().keys() >= _NEEDED
    )
    kind = command.row
    parsed = [kind.parse(_cells(record)) for record in rows.to_dict("records")]
    found = []
    run: Run[Any]
    for run in group(parsed):
        regular = run.row("regular")
        speculative = run.row("speculative")
        if regular is None or speculative is None:
            continue
        k = speculative.num_draft_tokens
        verdict = verdict_of(speculative)
        speedup = verdict.speedup
        found.append(
            {
                "model": speculative.model,
                "draft": speculative.draft,
                "K": k if isinstance(k, int) else None,
                "regular_ms": regular.ms_per_token,
                "ms": speculative.ms_per_token,
                "speedup": speedup.estimate,
                "low": speedup.low,
                "high": speedup.high,
                "covers": None if speedup.covers is None else str(speedup.covers),
                "accepted": speculative.acceptance_rate,
                "verdict": verdict.conclusion,
                "doubts": [*command.doubts(run)],
                "tokens_per_iteration": speculative.tokens_per_iteration,
                "batch_size": speculative.batch_size,
                "temperature": speculative.temperature,
                "run": run.id,
            }
        )
    return pd.DataFrame(found).astype({"K": "Int64"}) if found else pd.DataFrame()


def _cells(record: dict[Any, Any]) -> dict[str, str]:
    """A row as text, as a CSV file has it. pandas makes floats of whole numbers in columns with gaps."""
    import pandas as pd

    cells: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, list | tuple | dict):
            cells[name] = json.dumps(value)
        elif isinstance(value, float) and value.is_integer():
            cells[name] = str(int(value))
        elif not pd.isna(value):
            cells[name] = str(value)
    return cells
