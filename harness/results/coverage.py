"""The units that an interval is over, `Interval.covers`, as the column `speedup_covers` has them."""

from __future__ import annotations

import re
from typing import NamedTuple

from harness.results.statistics.interval import UNITS, Interval

_SAME_TEXTS = " of the same texts"


class Coverage(NamedTuple):
    """`15 prompts and 5 runs`, `8 laps of the same texts`, or `1 batch`.

    Attributes:
        unit: one of `UNITS`.
        num_runs: None for one run.
        same_texts: whether units share prompts, so that the interval does not allow for others.
    """

    unit: str
    num_units: int
    num_runs: int | None = None
    same_texts: bool = False

    @classmethod
    def of(cls, interval: Interval | None) -> Coverage | None:
        """What an interval covers; None where that is not known."""
        text = "" if interval is None else interval.covers
        units = re.match(rf"(\d+) ({'|'.join(UNITS)})", text)
        if units is None:
            return None
        runs = re.search(r"(\d+) runs?\b", text)
        num_runs = None if runs is None else int(runs[1])
        return cls(units[2], int(units[1]), num_runs, _SAME_TEXTS in text)


def of_same_texts(covers: str) -> str:
    """The cell for units that share prompts."""
    return f"{covers}{_SAME_TEXTS}"
