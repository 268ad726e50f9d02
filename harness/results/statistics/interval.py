"""An estimate with its confidence interval, and what the interval covers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

NAN = float("nan")

# A bootstrap over fewer units gives an interval that is far too narrow: over two prompts it is no
# more than their range.
FEWEST_FOR_INTERVAL = 8
# Student's t over blocks, which are several starts of each arm, needs no more than their variance.
FEWEST_BLOCKS = 2
# Of every interval that is shown.
CONFIDENCE = 0.95
# Names of units, whose times are independent of each other: a prompt, a batch of prompts, a lap of requests, and
# a block, all answers between one start of each arm and the next. `Coverage` finds them in `Interval.covers`.
UNITS = ("prompt", "batch", "lap", "block")
# Behind units that share prompts.
SAME_TEXTS = " of the same texts"


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Where data do not suffice, the bounds or all three numbers are nan. It is one value: one field of
    a row (`row.with_interval`), which is three columns in files only.

    Args:
        covers: the choices that the interval allows for, such as "15 prompts and 5 runs".
    """

    estimate: float = NAN
    low: float = NAN
    high: float = NAN
    covers: str = ""

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.estimate)

    @property
    def has_bounds(self) -> bool:
        return not math.isnan(self.low)

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly on one side of the value; never without bounds."""
        return self.low > value or self.high < value

    def scaled(self, factor: float) -> Interval:
        """All three numbers times a positive factor."""
        return replace(
            self, estimate=factor * self.estimate, low=factor * self.low, high=factor * self.high
        )


def counted(number: int, name: str) -> str:
    """`1 prompt`, `15 prompts`, `8 batches`."""
    if number == 1:
        return f"1 {name}"
    return f"{number} {name}{'es' if name.endswith(('ch', 's')) else 's'}"


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
        return cls(units[2], int(units[1]), num_runs, SAME_TEXTS in text)
