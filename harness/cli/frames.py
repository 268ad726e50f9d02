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
    """Rows as a DataFrame: the dozen columns that most questions need come first, and empty ones are left out."""
    import pandas as pd

    from harness.results.schema import CORE_COLUMNS

    whole = pd.DataFrame([row.values() for row in rows]).dropna(axis="columns", how="all")
    first = [name for name in CORE_COLUMNS if name in whole.columns]
    return whole[[*first, *whole.columns.difference(first, sort=False)]]


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each run of `latency`, with both of its arms: `pairs(run("latency", "-m", "K=2,4,8"))`.

    Args:
        rows: what `run` returned, or `pandas.read_csv("results/latency.csv")`.

    Returns:
        Columns: `model`, `draft`, `K` (Int64; <NA> where it is `auto`), `batch_size`, `temperature`, `regular_ms` and
        `ms` (per token), `speedup` with the ends `low` and `high` of its interval, `tokens_per_iteration`, `accepted`
        (the rate), `verdict` (`faster`, `slower` or `cannot tell`), `doubts` (sentences), `run`.

    Raises:
        SettingError: rows of another command, whose arms are not timed side by side.
    """
    import pandas as pd

    from harness.commands.registry import commands
    from harness.results.runs import group
    from harness.results.verdict import verdict_of

    if not set(rows.columns) >= _NEEDED:
        raise SettingError("rows", "must be those of latency, which times both arms")
    command = next(
        one for one in commands() if one.row is not None and one.row.columns().keys() >= _NEEDED
    )
    kind = command.row
    assert kind is not None
    parsed = [kind.parse(_cells(record)) for record in rows.to_dict("records")]
    found = []
    run: Run[Any]
    for run in group(parsed):
        regular = run.row("regular")
        speculative = run.row("speculative")
        if regular is None or speculative is None:
            continue
        page = command.page([run])
        number = speculative.num_draft_tokens
        found.append(
            {
                "model": speculative.model,
                "draft": speculative.draft,
                "K": number if isinstance(number, int) else None,
                "batch_size": speculative.batch_size,
                "temperature": speculative.temperature,
                "regular_ms": regular.ms_per_token,
                "ms": speculative.ms_per_token,
                "speedup": speculative.speedup and speculative.speedup.estimate,
                "low": speculative.speedup and speculative.speedup.low,
                "high": speculative.speedup and speculative.speedup.high,
                "tokens_per_iteration": speculative.tokens_per_iteration,
                "accepted": speculative.acceptance_rate,
                "verdict": verdict_of(speculative).conclusion,
                "doubts": [] if page is None else list(page.doubts),
                "run": run.id,
            }
        )
    return pd.DataFrame(found).astype({"K": "Int64"}) if found else pd.DataFrame()


def _cells(record: dict[Any, Any]) -> dict[str, str]:
    """A row as text, as a CSV file has it. pandas makes floats of whole numbers in columns with gaps."""
    cells: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, list | tuple | dict):
            cells[name] = json.dumps(value)
        elif isinstance(value, float) and value.is_integer():
            cells[name] = str(int(value))
        elif value is not None and value == value:  # only nan differs from itself
            cells[name] = str(value)
    return cells
