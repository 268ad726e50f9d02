"""Jobs that a sweep leaves out, because a smaller load saturates what they would measure: `until_saturated`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.run import RunSettings
from harness.results.schema import RunRow

# The least growth of tokens per second from one load to the next that is worth trying a larger one. Two measurements
# of the same may differ by as much.
LEAST_GROWTH = 0.05

# In the directory of a job that was left out: the reason.
_FILE = "left_out.txt"


# Of the jobs of this process, by their settings without the load, which is the batch size: the
# tokens per second of each arm under each load.
_measured: dict[str, dict[int, dict[str, float]]] = {}


def note(settings: RunSettings, rows: Sequence[RunRow]) -> None:
    """Remember the throughput of a job, if its sweep stops where that no longer grows."""
    if not _is_asked(settings):
        return
    of_arms: dict[str, float] = {}
    for row in rows:
        values: Any = row
        if row.status == "ok" and values.tokens_per_second:
            of_arms[values.arm] = values.tokens_per_second
    if of_arms:
        _measured.setdefault(_key(settings), {})[_load(settings)] = of_arms


def reached_before(settings: RunSettings) -> str | None:
    """Why a job need not be measured; None if it must be.

    It need not if its load is larger than all that were measured, and from the second largest of these to the
    largest the throughput of no arm grew by `LEAST_GROWTH`.
    """
    if not _is_asked(settings):
        return None
    rates_by_load = _measured.get(_key(settings), {})
    loads = sorted(rates_by_load)
    if len(loads) < 2 or _load(settings) <= loads[-1]:
        return None
    smaller, larger = loads[-2:]
    before, after = rates_by_load[smaller], rates_by_load[larger]
    arms = sorted(before.keys() & after.keys())
    growths = [after[arm] / before[arm] - 1 for arm in arms]
    if not arms or max(growths) >= LEAST_GROWTH:
        return None
    rates = ", ".join(f"{arm} {before[arm]:.1f} and {after[arm]:.1f} tokens/s" for arm in arms)
    return f"throughput does not grow from batch_size={smaller} to {larger} ({rates})"


def leave_out(directory: Path, reason: str) -> None:
    """Note in a job's directory that it is not measured."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _FILE).write_text(f"{reason}\n", encoding="utf-8")


def forget_left_out(sweep: Path) -> None:
    """Remove the notes of an earlier sweep with the same directory."""
    for note_file in sweep.rglob(_FILE):
        note_file.unlink()


def num_left_out(sweep: Path) -> int:
    """How many jobs of a sweep were left out."""
    return len(list(sweep.rglob(_FILE)))


def _is_asked(settings: RunSettings) -> bool:
    return getattr(settings, "until_saturated", False)


def _load(settings: Any) -> int:
    return int(settings.batch_size)


def _key(settings: Any) -> str:
    return repr(dataclasses.replace(settings, batch_size=1))
