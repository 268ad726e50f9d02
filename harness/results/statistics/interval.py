"""An estimate with its confidence interval, and the sources of variation that the interval covers."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.config.amounts import counted

# Printed in place of a figure that is not known, next to figures that are.
DASH = "–"
NAN = float("nan")

# A bootstrap over fewer units gives an interval that is far too narrow: over two prompts it is no wider than their
# range.
FEWEST_FOR_INTERVAL = 8
# A block is all answers between one start of the servers and the next. An interval over blocks is a Student's t
# interval; over two blocks, it would span orders of magnitude.
FEWEST_BLOCKS = 4
# Units of unequal lengths n vary as much as (Σn)² / Σn² units of equal length would (*effective* units). With fewer
# effective units than this, one or two long answers dominate, and the interval contained the true speed-up in only 63
# to 93 % of the runs (`benchmarks/intervals.py`).
FEWEST_EFFECTIVE = 4
# The level of every interval that is shown.
CONFIDENCE = 0.95


def t_quantile(tail: float, degrees_of_freedom: float) -> float:
    """The value that Student's t exceeds with the probability `tail`.

    `scipy.special` computes it, because importing `scipy.stats` takes longer than everything else before the first
    answer.
    """
    from scipy import special

    return -float(special.stdtrit(degrees_of_freedom, tail))


def fewest_units(unit: str) -> int:
    """The fewest units of this name over which an interval is computed."""
    return FEWEST_BLOCKS if unit == "block" else FEWEST_FOR_INTERVAL


@dataclass(frozen=True)
class Coverage:
    """The choices that an interval covers, such as the choice of prompts. As text: `15 prompts and 5 runs`, `8 laps of
    the same prompts`, or `1 batch`.

    Attributes:
        num_units: number of units; each is independent of the others.
        unit: the name of a unit: a `prompt`, a `conversation`, a `batch` of prompts, a `lap` of requests, or a `block`
            (all answers between one start of the servers and the next). For accuracy, a unit is a question, and for
            timed passes a round.
        same_texts: whether units share prompts, so that the interval does not cover other prompts.
        num_runs: number of runs that the interval covers; None for a single run.
        own_seeds: whether each run has a seed of its own.
        degrees_of_freedom: those of Student's t in an interval over runs. None for a single run: they are then taken to
            be one less than `fewest`.
        num_effective: number of units of equal length that would vary as much as these units. None if it is at least
            half of `num_units`.
        num_rejecting: number of units in which rejections of draft tokens added iterations, if these are fewer than
            half of all units. None if they are more, or if iterations are not known (`ExtraIterations.noted_in`). A
            rejection adds none if the answer would have ended in the same iteration without it.
        unseen: logarithm of the factor by which rare rejections, which these units may have missed, could raise the
            number of iterations in the long run; 0 if there are enough rejections to judge.
    """

    num_units: int
    unit: str
    same_texts: bool = False
    num_runs: int | None = None
    own_seeds: bool = False
    degrees_of_freedom: float | None = None
    num_effective: int | None = None
    num_rejecting: int | None = None
    unseen: float = 0.0

    def __str__(self) -> str:
        text = counted(self.num_units, self.unit)
        if self.same_texts:
            text += " of the same prompts"
        if self.num_effective is not None:
            text += f" (of which {self.num_effective} count)"
        if self.num_runs is not None:
            text += f" and {counted(self.num_runs, 'run')}"
        if self.own_seeds:
            text += " with a seed each"
        of_run = "" if self.num_runs is None else " of one run"
        if self.num_rejecting:
            text += f" (holds if it is typical that rejections added iterations in {self.num_rejecting}{of_run})"
        elif self.num_rejecting is not None:
            text += " (holds if it is typical that rejections added no iteration)"
        return text

    @property
    def why_no_interval(self) -> str:
        """The reason why an interval over these units has no bounds, such as `no interval from fewer than 8
        prompts`.
        """
        if self.num_effective is not None and self.num_units >= FEWEST_FOR_INTERVAL:
            units = replace(self, num_rejecting=None)
            return f"no interval from {units}: the others' answers are much shorter"
        return f"no interval from fewer than {counted(fewest_units(self.unit), self.unit)}"

    @property
    def fewest(self) -> int:
        """The smallest number among the choices: for `15 prompts and 5 runs`, it is 5."""
        num_units = self.num_effective or self.num_units
        return min(num_units, self.num_runs or num_units)

    @classmethod
    def of(cls, interval: Interval | None) -> Coverage | None:
        """The coverage of an interval; None if there is no interval, or if its coverage is not known."""
        return None if interval is None else interval.covers

    @classmethod
    def read(cls, stored: object) -> Coverage | None:
        """The coverage that a file stores (`Interval.parts`); None if the stored value is not a coverage."""
        with suppress(ValidationError):
            return _STORED.validate_python(stored)
        return None


_STORED = TypeAdapter(Coverage)


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    With too few data, the bounds are nan, or all three numbers are. In memory, an interval is a single field of a row;
    in a file, it becomes several columns.

    Attributes:
        covers: the choices that the interval covers; None if they are not known.
    """

    estimate: float = NAN
    low: float = NAN
    high: float = NAN
    covers: Coverage | None = None

    def __eq__(self, other: object) -> bool:
        """Whether all numbers and the coverage are equal; unknown numbers are equal, as in Python before 3.13."""
        return isinstance(other, Interval) and self.parts() == other.parts()

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.estimate)

    @property
    def has_bounds(self) -> bool:
        return not math.isnan(self.low)

    def parts(self) -> dict[str, Any]:
        """`estimate`, `low`, `high` and `covers`, by name, for files. Numbers that are not finite become None."""
        numbers = {"estimate": self.estimate, "low": self.low, "high": self.high}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        covers = self.covers
        stored = None if covers is None else _STORED.dump_python(covers, exclude_defaults=True)
        return {**finite, "covers": stored}

    def __format__(self, form: str) -> str:
        """Format the estimate with its bounds, if there are any; an unknown estimate is a dash.

        f"{speedup:×}"    2.31× (2.18 to 2.42)
        f"{share:%}"      58 % (52 to 61)
        f"{number:.1f}"   4.1 (3.8 to 4.4)
        """
        if not self.is_known:
            return DASH
        unit = " %" if form.endswith("%") else "×" if form == "×" else ""
        bounds = self.bounds(form)
        text = f"{self._text(self.estimate, form)}{unit}"
        return f"{text} ({bounds})" if bounds else text

    def bounds(self, form: str = "×") -> str | None:
        """The bounds as text, such as `2.18 to 2.42`, in the formats of `__format__`; None without bounds."""
        if not self.has_bounds:
            return None
        texts = []
        for bound in (self.low, self.high):
            text = self._text(bound, form)
            # A bound that excludes 1 must not look like 1.
            if text == "1.00" and bound != 1:
                text = f"{bound:.4f}"
            texts.append(text)
        return " to ".join(texts)

    @staticmethod
    def _text(value: float, form: str) -> str:
        if form.endswith("%"):
            return f"{100 * value:{form[:-1] or '.0'}f}"
        return f"{value:{'.2f' if form == '×' else form}}"

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly above or below the value; False without bounds."""
        return self.low > value or self.high < value

    def scaled(self, factor: float) -> Interval:
        """Return the interval with its value and both bounds multiplied by a positive factor."""
        return replace(
            self, estimate=factor * self.estimate, low=factor * self.low, high=factor * self.high
        )
