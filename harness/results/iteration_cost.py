"""What an iteration costs, by the tokens that it verifies and the rows in flight, as one value that predicts.

An iteration drafts K tokens of each row and verifies K + 1, its *width*. A regular step is an iteration of width 1.
What an iteration costs belongs to an engine, a pair and a load; what it yields belongs to a pair and a text. So costs
that were measured on one text, times the yield on another, predict a speed-up that nobody measured:

    speed-up = tokens per iteration / (time of an iteration / time of a regular step at the same load)

All of it is of decoding, without reading the prompt. Nothing is extrapolated beyond the widths and loads that were
measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.config.amounts import change_in_percent
from harness.config.errors import SettingError
from harness.results.locked_files import replace_file
from harness.results.statistics.arrays import Floats
from harness.results.statistics.distributions import t_quantile
from harness.results.statistics.interval import CONFIDENCE, Coverage, Interval

# In the directory of a run of `latency`; `costs.schema.json` beside this file describes it.
COSTS_FILE = "costs.json"
_VERSION = 1
# Points are no line if the test says so at this level and one is at least this share off.
_LEVEL = 0.05
_TOLERATED = 0.02
# A step that is named is at least this share of the time off a line.
_LEAST_STEP = 0.03
# How well times are known where nobody says it.
_UNKNOWN_NOISE = 0.02
# Answers that take this many times as long as decoding explains, beside the regular ones, have waited in a queue.
QUEUED = 1.5


def why_queued(rows: int, waits: float) -> str:
    """The reason for which a load has no price.

    Args:
        waits: the time of an answer over that of decoding it, over the same of the regular arm.
    """
    return (
        f"has no price with {rows} in flight: beside the regular ones, answers take {waits:.1f} times as long as"
        " decoding explains, so that the engine queues: ask for fewer at once"
    )


class StartNoise(NamedTuple):
    """What differs from start to start: each width was measured with another one.

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
            return cls(_UNKNOWN_NOISE, 1e6)
        return cls(float(np.std(np.log(steps_ms), ddof=1)), len(steps_ms) - 1)


class Step(NamedTuple):
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
        steps: the jumps that explain what is no line; () where none does.
    """

    fixed: Interval | None
    per_token: Interval | None
    tested: bool
    steps: Sequence[Step] = ()

    @property
    def is_line(self) -> bool:
        return self.fixed is not None

    def __str__(self) -> str:
        """Of what is no line: `no line, from 8 to 9 tokens +41 %`."""
        return ", ".join(["no line", *map(str, self.steps)])


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


class Best(NamedTuple):
    """The K with the highest predicted speed-up, and those that cannot be told from it."""

    k: int
    speedup: Interval
    alike: Sequence[int]


@dataclass(frozen=True)
class IterationCost:
    """The price of an iteration at each width and load that was measured, see the head of this file.

    Attributes:
        points: by load and width; a regular step is that of width 1.
        source: where it is from, for pages.
        refused: why there is no price at a load, by its rows in flight.
        in_bytes: whether it is of the bytes that must be read, which is a bound and no measurement; then there are
            steps without milliseconds.
        start_noise: by rows in flight, of widths that were measured with a start each.
        one_step: whether all K of a load have the same regular step, whose error then moves none against another.
    """

    points: Sequence[Point] = ()
    source: str = ""
    refused: Mapping[int, str] = field(default_factory=dict)
    in_bytes: bool = False
    one_step: bool = False
    start_noise: Mapping[int, StartNoise] = field(default_factory=dict)

    @classmethod
    def of_points(
        cls,
        points: Iterable[tuple[int, int, float | Interval]],
        source: str = "",
        refused: Mapping[int, str] | None = None,
    ) -> IterationCost:
        """From a table: (width, rows in flight, milliseconds) of each point. A regular step has width 1.

        Bounds of an iteration and of a regular step count as independent. Of a width and load that occur several times
        the mean counts.
        """
        by_place: dict[tuple[int, int], list[Interval]] = {}
        for width, rows, ms in points:
            time = ms if isinstance(ms, Interval) else Interval(float(ms))
            by_place.setdefault((rows, width), []).append(time)
        times = {load_and_width: mean_time(several) for load_and_width, several in by_place.items()}
        made = []
        for (rows, width), ms in sorted(times.items()):
            step_ms = times.get((rows, 1))
            steps = Interval() if step_ms is None else _ratio(ms, step_ms)
            made.append(Point(width, rows, ms, Interval(1.0) if width == 1 else steps))
        return cls(tuple(made), source, refused or {}, one_step=True)

    @classmethod
    def of_passes(cls, rounds: Sequence[Mapping[int, float]], source: str) -> IterationCost:
        """From passes of a server that drafts nothing: milliseconds by width, in rounds. Medians, which stalls do not
        move.
        """
        points = []
        for width in rounds[0]:
            ms = _median([times[width] for times in rounds])
            points.append(
                Point(width, 1, ms, _median([times[width] / times[1] for times in rounds]))
            )
        return cls(tuple(points), source)

    @classmethod
    def of_steps(cls, steps: Mapping[int, float], source: str, rows: int = 1) -> IterationCost:
        """From bytes: what an iteration of each K reads, in regular steps."""
        points = [Point(k + 1, rows, Interval(), Interval(cost)) for k, cost in steps.items()]
        return cls(tuple(points), source, in_bytes=True)

    @property
    def loads(self) -> Sequence[int]:
        """Rows in flight at which an iteration has a price in steps."""
        return sorted({point.rows for point in self.points if point.width > 1})

    def ks(self, rows: int = 1) -> Sequence[int]:
        """The K that have a price in steps at a load."""
        priced = [point for point in self.points if point.rows == rows and point.steps.is_known]
        return sorted(point.width - 1 for point in priced if point.width > 1)

    def _measured(self, k: int, rows: int) -> Point | None:
        """An iteration of K draft tokens, also at a load that is refused; None where it was not measured."""
        width_and_rows = (k + 1, rows)
        return next(
            (point for point in self.points if (point.width, point.rows) == width_and_rows), None
        )

    def step_ms(self, rows: int = 1) -> Interval:
        """A regular step at a load; unknown where it was not measured."""
        point = self._measured(0, rows)
        return Interval() if point is None else point.ms

    def steps_at(self, k: int, rows: int = 1) -> Interval:
        """Regular steps of an iteration, also at a load that is refused; unknown where it was not measured."""
        point = self._measured(k, rows)
        return Interval() if point is None else point.steps

    def answer_length(self, k: int, rows: int = 1) -> float | None:
        """Mean tokens of the answers by which an iteration was measured; None where that is unknown."""
        point = self._measured(k, rows)
        return None if point is None else point.answer_length

    def at(self, k: int, rows: int = 1) -> Point:
        """The iteration of K draft tokens at a load.

        Raises:
            SettingError: it was not measured, or its regular step was not, or the engine queued.
        """
        if rows in self.refused:
            raise SettingError("costs", self.refused[rows])
        point = self._measured(k, rows)
        if point is not None and point.steps.is_known:
            return point
        ks = ", ".join(map(str, self.ks(rows)))
        load = f" with {rows} in flight" if rows > 1 or len(self.loads) > 1 else ""
        rule = f"has no price of K={k}{load}"
        if rows in self.loads and not ks:
            step = "measure one (draft=none), or add a row without k"
            raise SettingError("costs", f"has no regular step{load}: {step}")
        if ks:
            raise SettingError("costs", f"{rule}, but of K={ks}: measure K={k}")
        loads = ", ".join(map(str, self.loads)) or "none"
        raise SettingError(
            "costs", f"{rule}, but with {loads} in flight: measure batch_size={rows}"
        )

    def speedup(self, tokens_per_iteration: Interval | float, k: int, rows: int = 1) -> Interval:
        """The speed-up of decoding that so many tokens per iteration give; its interval has those of cost and yield."""
        return _ratio(_as_interval(tokens_per_iteration), self.at(k, rows).steps)

    def best_k(self, yields: Mapping[int, Interval | float], rows: int = 1) -> Best:
        """The best of the K that have both a price and a yield.

        K cannot be told from it where the difference may be 0, with the bounds of cost and yield taken as independent,
        but for a regular step that they share: yields of the same texts are not, so that more K are named than need be.

        Raises:
            SettingError: no K has both.
        """
        common = [k for k in self.ks(rows) if k in yields]
        if rows in self.refused or not common:
            for k in yields:
                self.at(k, rows)
            raise SettingError("acceptance", "has no K")
        speedups = {k: self.speedup(yields[k], k, rows) for k in common}
        best = max(common, key=lambda k: speedups[k].estimate)
        speeds = speedups
        if self.one_step:
            speeds = {k: _ratio(_as_interval(yields[k]), self.at(k, rows).ms) for k in common}
        alike = []
        for k in common:
            share = _ratio(speeds[k], speeds[best])
            if k != best and share.has_bounds and not share.excludes(1):
                alike.append(k)
        return Best(best, speedups[best], alike)

    def shape(self, rows: int = 1) -> Shape | None:
        """Whether the times of an iteration at a load are a line over its draft tokens; None with fewer than two.

        The line is weighted by the times' own noise and that between starts. Residuals over that noise are tested as a
        sum of squares over the degrees of freedom, by Fisher's F with those of the noise; a regular step, which drafts
        nothing, is not part of it.
        """
        points = [
            point
            for point in self.points
            if point.rows == rows and point.width > 1 and point.time.is_known
        ]
        drafted = np.array([point.drafted for point in points], float)
        if len(set(drafted)) < 2:
            return None
        ms = np.array([point.time.estimate for point in points], float)
        # Nothing is known better than rounding.
        errors = np.maximum([_standard_error(point.time) for point in points], 1e-6 * ms)
        covers = [
            point.time.covers for point in points if point.time.covers and point.time.has_bounds
        ]
        are_known = len(covers) == len(points)
        freedom: float = min([cover.num_units - 1 for cover in covers], default=1e6)
        if rows in self.start_noise:
            share, starts_freedom = self.start_noise[rows]
            within, between = float(np.square(errors / ms).mean()), share**2
            # Several runs of a width show what differs between them by themselves.
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
        return Shape(None, None, tested, _steps(points, line, ms, errors, freedom))

    def as_json(self) -> dict[str, Any]:
        """For `costs.json`, which `from_json` reads."""
        points = []
        for point in self.points:
            points.append(
                {
                    "width": point.width,
                    "rows": point.rows,
                    "num_drafted": point.num_drafted,
                    "ms": _as_json(point.ms),
                    "steps": _as_json(point.steps),
                    "answer_length": point.answer_length,
                }
            )
        refused = {str(rows): reason for rows, reason in self.refused.items()}
        return {"version": _VERSION, "source": self.source, "points": points, "refused": refused}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> IterationCost:
        """The reverse of `as_json`.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        if content["version"] != _VERSION:
            raise ValueError(f"is of version {content['version']}")
        points = []
        for point in content["points"]:
            drafted = point.get("num_drafted")
            times = (_from_json(point["ms"]), _from_json(point["steps"]))
            length = point.get("answer_length")
            points.append(Point(int(point["width"]), int(point["rows"]), *times, drafted, length))
        refused = {int(rows): str(reason) for rows, reason in content.get("refused", {}).items()}
        return cls(tuple(points), str(content.get("source", "")), refused)


def write_costs(directory: Path, cost: IterationCost) -> None:
    """Write the file of a run, whole or not at all."""
    content = json.dumps(cost.as_json(), indent=1, allow_nan=False)
    replace_file(directory / COSTS_FILE, f"{content}\n".encode())


def _fits(design: Floats, ms: Floats, errors: Floats, freedom: float) -> bool:
    """Whether a model explains the times but for their noise, or but for what does not matter."""
    residuals = _residuals(design, ms, errors)
    num_free = len(ms) - design.shape[1]
    if num_free <= 0 or (np.abs(residuals) <= _TOLERATED * ms).all():
        return True
    from scipy import special

    mean_square = float(np.square(residuals / errors).sum()) / num_free
    return float(special.fdtrc(num_free, freedom, mean_square)) >= _LEVEL


def _residuals(design: Floats, ms: Floats, errors: Floats) -> Floats:
    coefficients = np.linalg.lstsq(design / errors[:, None], ms / errors, rcond=None)[0]
    return np.asarray(ms - design @ coefficients)


def _coefficients(design: Floats, ms: Floats, errors: Floats, freedom: float) -> Sequence[Interval]:
    """Weighted least squares, each with its interval."""
    # Not by `weighted.T @ weighted`, which overflows where a file holds a number that no machine takes.
    inverse = np.linalg.pinv(design / errors[:, None])
    covariance = inverse @ inverse.T
    coefficients = inverse @ (ms / errors)
    widths = t_quantile((1 - CONFIDENCE) / 2, freedom) * np.sqrt(np.diag(covariance))
    return [
        Interval(float(value), float(value - width), float(value + width))
        for value, width in zip(coefficients, widths, strict=True)
    ]


def _steps(
    points: Sequence[Point], line: Floats, ms: Floats, errors: Floats, freedom: float
) -> Sequence[Step]:
    """The fewest jumps between neighbours that, on top of a line, explain the times; () where none do.

    At each turn the jump is added that explains most. With fewer points than a line, a jump and one to test them with
    nothing can be said.
    """
    design = line
    indices: list[int] = []
    while len(ms) - design.shape[1] > 1 and not _fits(design, ms, errors, freedom):
        left = {}
        for index in range(1, len(ms)):
            if index not in indices:
                jump = (np.arange(len(ms)) >= index).astype(float)
                larger = np.column_stack([design, jump])
                residuals = _residuals(larger, ms, errors) / errors
                left[index] = (float(np.square(residuals).sum()), larger)
        best = min(left, key=lambda index: left[index][0])
        design = left[best][1]
        indices.append(best)
    jumps = np.linalg.lstsq(design / errors[:, None], ms / errors, rcond=None)[0][line.shape[1] :]
    steps = []
    for index, jump in zip(indices, jumps, strict=True):
        change = float(jump / ms[index - 1])
        if abs(change) >= _LEAST_STEP:
            steps.append(Step(points[index - 1].width, points[index].width, change))
    return sorted(steps)


def _standard_error(time: Interval) -> float:
    """That of a time, from the width of its interval. Bounds that cover nothing are those of rounding, beside noise."""
    width = time.high - time.low if time.has_bounds else 0.0
    if time.covers is None or not time.has_bounds:
        return math.hypot(_UNKNOWN_NOISE * time.estimate, width / math.sqrt(12))
    return width / (2 * t_quantile((1 - CONFIDENCE) / 2, time.covers.num_units - 1))


def _as_interval(value: Interval | float) -> Interval:
    return value if isinstance(value, Interval) else Interval(float(value))


def _ratio(numerator: Interval, denominator: Interval) -> Interval:
    """Of two independent numbers: what is above and below each is added in squares, as logarithms."""
    estimate = numerator.estimate / denominator.estimate
    parts = [interval for interval in (numerator, denominator) if interval.has_bounds]
    if not parts or not estimate > 0:
        return Interval(estimate)
    above = below = 0.0
    if numerator.has_bounds:
        above += math.log(numerator.high / numerator.estimate) ** 2
        below += math.log(numerator.estimate / numerator.low) ** 2
    if denominator.has_bounds:
        above += math.log(denominator.estimate / denominator.low) ** 2
        below += math.log(denominator.high / denominator.estimate) ** 2
    # The part with fewer units decides how good the interval is.
    coverages = [part.covers for part in parts if part.covers]
    covers = min(coverages, key=lambda coverage: coverage.num_units) if coverages else None
    low, high = estimate * math.exp(-math.sqrt(below)), estimate * math.exp(math.sqrt(above))
    return Interval(estimate, low, high, covers)


def _median(values: Sequence[float]) -> Interval:
    """With an interval between two of the values, which holds whatever their distribution is."""
    from scipy import stats

    ordered = sorted(values)
    first = max(1, int(stats.binom.ppf((1 - CONFIDENCE) / 2, len(ordered), 0.5))) - 1
    covers = Coverage(len(ordered), "round")
    return Interval(float(np.median(ordered)), ordered[first], ordered[-1 - first], covers)


def mean_time(times: Sequence[Interval]) -> Interval:
    """The geometric mean of independent measurements of one time, whose interval has what the measurements say of
    themselves, and is no narrower than what differs between them.
    """
    number = len(times)
    if number == 1:
        return times[0]
    logarithms = np.log([time.estimate for time in times])
    mean = math.exp(logarithms.mean())
    if not all(time.has_bounds for time in times):
        return Interval(mean)
    below = [math.log(time.estimate / time.low) for time in times]
    above = [math.log(time.high / time.estimate) for time in times]
    between = t_quantile((1 - CONFIDENCE) / 2, number - 1) * logarithms.std(ddof=1)
    lower = max(math.hypot(*below) / number, between / math.sqrt(number))
    upper = max(math.hypot(*above) / number, between / math.sqrt(number))
    covers = times[0].covers
    if covers is not None:
        covers = replace(covers, num_runs=number)
    return Interval(mean, mean * math.exp(-lower), mean * math.exp(upper), covers)


def _as_json(value: Interval) -> dict[str, Any] | None:
    if not value.is_known:
        return None
    bounds = (value.low, value.high) if value.has_bounds else (None, None)
    covers = None if value.covers is None else str(value.covers)
    return {"estimate": value.estimate, "low": bounds[0], "high": bounds[1], "covers": covers}


def _from_json(content: Mapping[str, Any] | None) -> Interval:
    if content is None:
        return Interval()
    numbers = [content.get(name) for name in ("estimate", "low", "high")]
    covers = Coverage.read(content["covers"]) if content.get("covers") else None
    if any(number is not None and not 0 < number < math.inf for number in numbers):
        raise ValueError(f"a time is not positive: {content}")
    estimate, low, high = (math.nan if number is None else float(number) for number in numbers)
    return Interval(estimate, low, high, covers)
