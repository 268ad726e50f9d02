"""An iteration that was measured, and whether the times of several are a line over their draft tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from harness.config.amounts import change_in_percent
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import CONFIDENCE, Interval, t_quantile

# Points are no line if the test says so at this level and one is at least this share off.
_LEVEL = 0.05
_TOLERATED = 0.02
# Jumps of less than this share of the time before them are not named.
_LEAST_JUMP = 0.03
# Assumed noise where none is stated, of a time and between starts.
_UNKNOWN_NOISE = 0.02
# Degrees of freedom of noise that is taken as known.
_KNOWN = 1e6


@dataclass(frozen=True)
class Point:
    """An iteration that was measured.

    Attributes:
        width: tokens of each row that it verifies: K + 1.
        rows: in flight.
        ms: its time.
        steps: the same in regular steps at this load; without an estimate where no regular step is known.
        num_drafted: draft tokens that it had on average: fewer than K at the ends of answers.
        answer_length: mean tokens of the answers that it was measured by; None where it is unknown.
    """

    width: int
    rows: int
    ms: Interval
    steps: Interval = field(default_factory=Interval)
    num_drafted: float | None = None
    answer_length: float | None = None

    @property
    def drafted(self) -> float:
        return self.width - 1 if self.num_drafted is None else self.num_drafted

    @property
    def time(self) -> Interval:
        """`ms`, and where these are unknown `steps`."""
        return self.ms if self.ms.is_known else self.steps


class StartNoise(NamedTuple):
    """Noise between starts, where each width had one of its own.

    Attributes:
        share: standard deviation, as a share of a time.
        freedom: degrees of freedom of this estimate.
    """

    share: float
    freedom: float

    @classmethod
    def of(cls, steps_ms: Sequence[float]) -> StartNoise:
        """From one time that several starts repeat, the regular step; of fewer than two a usual one."""
        if len(steps_ms) < 2:
            return cls(_UNKNOWN_NOISE, _KNOWN)
        return cls(float(np.std(np.log(steps_ms), ddof=1)), len(steps_ms) - 1)


class Jump(NamedTuple):
    """A jump of the time between two neighbouring widths that were measured.

    Attributes:
        change: what it adds to a line, as a share of the time before it: 0.41 for +41 %.
    """

    before: int
    after: int
    change: float

    def __str__(self) -> str:
        percent = change_in_percent(1 + self.change, 0).replace("-", "−")
        return f"from {self.before} to {self.after} tokens {percent}"


@dataclass(frozen=True)
class Shape:
    """Whether the times of an iteration are a line over the draft tokens.

    Attributes:
        fixed, per_token: of the line, in ms, or in steps of points without; None where the points are none.
        tested: whether noise was known and there were more than two points to test it with.
        jumps: those that explain what is no line; () where none do, or they are too small to name.
    """

    fixed: Interval | None
    per_token: Interval | None
    tested: bool
    jumps: Sequence[Jump] = ()

    @property
    def why_no_line(self) -> str:
        """`no line, from 8 to 9 tokens +41 %`."""
        return ", ".join(["no line", *map(str, self.jumps)])


def shape_of(points: Sequence[Point], start_noise: StartNoise | None = None) -> Shape | None:
    """Whether the times of iterations at a load are a line over their draft tokens; None with fewer than two.

    The line is weighted by the times' own noise and that between starts. Residuals over that noise are tested as a
    sum of squares over the degrees of freedom, by Fisher's F with those of the noise; a regular step, which drafts
    nothing, is not part of it.

    Args:
        start_noise: where each width had a start of its own.
    """
    points = [point for point in points if point.width > 1 and point.time.is_known]
    points.sort(key=lambda point: point.width)
    drafted = np.array([point.drafted for point in points], float)
    if len(set(drafted)) < 2:
        return None
    ms = np.array([point.time.estimate for point in points], float)
    # Nothing is known better than rounding.
    errors = np.maximum([_standard_error(point.time) for point in points], 1e-6 * ms)
    covers = [point.time.covers for point in points if point.time.covers and point.time.has_bounds]
    are_known = len(covers) == len(points)
    freedom: float = min([cover.num_units - 1 for cover in covers], default=_KNOWN)
    if start_noise is not None:
        share, starts_freedom = start_noise
        within, between = float(np.square(errors / ms).mean()), share**2
        # The interval over several runs includes the noise between starts.
        were_once = [cover.num_runs is None for cover in covers] if are_known else True
        errors = np.hypot(errors, share * ms * np.array(were_once))
        # Of a sum of two variances, by Satterthwaite.
        freedom = (within + between) ** 2 / (within**2 / freedom + between**2 / starts_freedom)
    line = np.stack([np.ones_like(drafted), drafted], axis=1)
    tested = are_known and len(points) > 2
    if _fits(line, ms, errors, freedom):
        fixed, per_token = _coefficients(line, ms, errors, freedom)
        if are_known:
            covers_both = covers[0]
            return Shape(
                replace(fixed, covers=covers_both),
                replace(per_token, covers=covers_both),
                tested,
            )
        return Shape(Interval(fixed.estimate), Interval(per_token.estimate), tested)
    return Shape(None, None, tested, _jumps(points, line, ms, errors, freedom))


def _fits(design: Floats, ms: Floats, errors: Floats, freedom: float) -> bool:
    """Whether a model explains the times up to their noise, or up to 2 %."""
    residuals = _residuals(design, ms, errors)
    num_free = len(ms) - design.shape[1]
    if num_free <= 0 or (np.abs(residuals) <= _TOLERATED * ms).all():
        return True
    from scipy import special

    mean_square = float(np.square(residuals / errors).sum()) / num_free
    return float(special.fdtrc(num_free, freedom, mean_square)) >= _LEVEL


def _fitted(design: Floats, ms: Floats, errors: Floats) -> Floats:
    """Coefficients by weighted least squares."""
    return np.asarray(np.linalg.lstsq(design / errors[:, None], ms / errors, rcond=None)[0])


def _residuals(design: Floats, ms: Floats, errors: Floats) -> Floats:
    return np.asarray(ms - design @ _fitted(design, ms, errors))


def _coefficients(design: Floats, ms: Floats, errors: Floats, freedom: float) -> Sequence[Interval]:
    """The coefficients of `_fitted`, each with its interval."""
    # `weighted.T @ weighted` would overflow where a file holds absurd numbers.
    inverse = np.linalg.pinv(design / errors[:, None])
    covariance = inverse @ inverse.T
    coefficients = _fitted(design, ms, errors)
    widths = t_quantile((1 - CONFIDENCE) / 2, freedom) * np.sqrt(np.diag(covariance))
    return [
        Interval(float(value), float(value - width), float(value + width))
        for value, width in zip(coefficients, widths, strict=True)
    ]


def _jumps(
    points: Sequence[Point], line: Floats, ms: Floats, errors: Floats, freedom: float
) -> Sequence[Jump]:
    """The fewest jumps between neighbours that, on top of a line, explain the times; () where none do. Small ones are
    not named.

    Each turn adds the jump that explains most. It needs more points than a line and a jump have coefficients.

    Args:
        points: by width.
    """
    design = line
    indices: list[int] = []
    while len(ms) - design.shape[1] > 1 and not _fits(design, ms, errors, freedom):
        designs: dict[int, Floats] = {}
        unexplained: dict[int, float] = {}
        for index in range(1, len(ms)):
            if index not in indices:
                jump = (np.arange(len(ms)) >= index).astype(float)
                designs[index] = np.column_stack([design, jump])
                residuals = _residuals(designs[index], ms, errors) / errors
                unexplained[index] = float(np.square(residuals).sum())
        best = min(unexplained, key=unexplained.__getitem__)
        design = designs[best]
        indices.append(best)
    if not _fits(design, ms, errors, freedom):
        return ()
    added_ms = _fitted(design, ms, errors)[line.shape[1] :]
    jumps = []
    for index, added in zip(indices, added_ms, strict=True):
        change = float(added / ms[index - 1])
        if abs(change) >= _LEAST_JUMP:
            jumps.append(Jump(points[index - 1].width, points[index].width, change))
    return sorted(jumps)


def _standard_error(time: Interval) -> float:
    """The standard error of a time, from the width of its interval. Bounds without coverage are those of rounding,
    and noise is added.
    """
    width = time.high - time.low if time.has_bounds else 0.0
    if time.covers is None or not time.has_bounds:
        return math.hypot(_UNKNOWN_NOISE * time.estimate, width / math.sqrt(12))
    return width / (2 * t_quantile((1 - CONFIDENCE) / 2, time.covers.num_units - 1))
