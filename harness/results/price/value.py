"""The cost of an iteration, by the tokens that it verifies and the rows in flight, as one value that predicts.

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
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from harness.config.errors import SettingError
from harness.results.locked_files import replace_file
from harness.results.price.shape import Point, Shape, StartNoise, shape_of
from harness.results.statistics.interval import CONFIDENCE, Coverage, Interval, t_quantile

# In the directory of a run of `latency`; `costs.schema.json` beside this file describes it.
COSTS_FILE = "costs.json"
_VERSION = 1
# What an iteration costs with other texts of a sweep, over what it costs with those that it was measured with: 19 of 20
# were within this factor, of so many public sweeps (`benchmarks/transfer.py`).
OTHER_TEXTS = Interval(1.0, 1 / 1.21, 1.21)
NUM_SWEEPS = 13
# Answers that take this many times as long as decoding alone, compared with the regular ones, have waited in a queue.
_QUEUED = 1.5


def why_queued(rows: int, waits: float) -> str | None:
    """Why a load has no price; None where the engine does not queue.

    Args:
        waits: the time of an answer over that of decoding it, over the same of the regular arm.
    """
    if waits < _QUEUED:
        return None
    return (
        f"has no price with {rows} in flight: compared with the regular ones, answers take {waits:.1f} times as long as"
        " decoding alone: requests are queueing, ask for fewer at once"
    )


_POINT = TypeAdapter(Point)


@dataclass(frozen=True)
class IterationCost:
    """The price of an iteration at each width and load that was measured, see the head of this file.

    Attributes:
        points: by load and width; a regular step is that of width 1.
        source: where it is from, as `costs.json` has it; empty for a bound from bytes, which no file stores.
        refused: why there is no price at a load, by its rows in flight.
        start_noise: by rows in flight, of widths that were measured with a start each.
        one_step: whether all K of a load have the same regular step, whose error then moves none against another.
    """

    points: Sequence[Point] = ()
    source: str = ""
    refused: Mapping[int, str] = field(default_factory=dict)
    one_step: bool = False
    start_noise: Mapping[int, StartNoise] = field(default_factory=dict)

    @classmethod
    def from_points(
        cls,
        points: Iterable[tuple[int, int, Interval]],
        source: str,
        refused: Mapping[int, str],
    ) -> IterationCost:
        """From a table: (width, rows in flight, milliseconds) of each point. A regular step has width 1.

        Bounds of an iteration and of a regular step count as independent. Of a width and load that occur several times
        the mean counts.
        """
        by_place: dict[tuple[int, int], list[Interval]] = {}
        for width, rows, ms in points:
            by_place.setdefault((rows, width), []).append(ms)
        times = {load_and_width: mean_time(several) for load_and_width, several in by_place.items()}
        made = []
        for (rows, width), ms in sorted(times.items()):
            step_ms = times.get((rows, 1))
            steps = Interval() if step_ms is None else ratio(ms, step_ms)
            made.append(Point(width, rows, ms, Interval(1.0) if width == 1 else steps))
        return cls(tuple(made), source, refused, one_step=True)

    @classmethod
    def from_passes(cls, rounds: Sequence[Mapping[int, float]], source: str) -> IterationCost:
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
    def from_steps(cls, steps: Mapping[int, float]) -> IterationCost:
        """From bytes: what an iteration of each K reads, in regular steps. It is a bound, without milliseconds."""
        points = [Point(k + 1, 1, Interval(), Interval(cost)) for k, cost in steps.items()]
        return cls(tuple(points))

    @property
    def loads(self) -> Sequence[int]:
        """Rows in flight at which an iteration was measured, with or without a regular step."""
        return sorted({point.rows for point in self.points if point.width > 1})

    def ks(self, rows: int = 1) -> Sequence[int]:
        """The K that have a price in steps at a load."""
        priced = [point for point in self.points if point.rows == rows and point.steps.is_known]
        return sorted(point.width - 1 for point in priced if point.width > 1)

    def point(self, k: int, rows: int = 1) -> Point:
        """The iteration of K draft tokens (0: a regular step), also at a load that is refused; without figures where it
        was not measured.
        """
        for point in self.points:
            if (point.width, point.rows) == (k + 1, rows):
                return point
        return Point(k + 1, rows, Interval())

    def shape(self, rows: int = 1) -> Shape | None:
        """Whether the times at a load are a line, see `shape_of`."""
        points = [point for point in self.points if point.rows == rows]
        return shape_of(points, self.start_noise.get(rows))

    def at(self, k: int, rows: int = 1) -> Point:
        """The iteration of K draft tokens at a load.

        Raises:
            SettingError: it was not measured, or its regular step was not, or the engine queued.
        """
        if rows in self.refused:
            raise SettingError("costs", self.refused[rows])
        point = self.point(k, rows)
        if point.steps.is_known:
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
        rule = f"has no price with {rows} in flight, but with {loads} in flight"
        raise SettingError("costs", f"{rule}: measure batch_size={rows}")

    def speedup(self, tokens_per_iteration: Interval, k: int, rows: int = 1) -> Interval:
        """The speed-up of decoding at this yield; its interval has those of cost and yield."""
        return ratio(tokens_per_iteration, self.at(k, rows).steps)

    def as_json(self) -> dict[str, Any]:
        """For `costs.json`, which `from_json` reads."""
        points = []
        for point in self.points:
            ms = point.ms.parts() if point.ms.is_known else None
            steps = point.steps.parts() if point.steps.is_known else None
            points.append(vars(point) | {"ms": ms, "steps": steps})
        refused = {str(rows): reason for rows, reason in self.refused.items()}
        return {"version": _VERSION, "source": self.source, "points": points, "refused": refused}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> IterationCost:
        """The reverse of `as_json`, which leaves out how starts of servers differ.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        if content["version"] != _VERSION:
            raise ValueError(f"is of version {content['version']}")
        points = []
        for point in content["points"]:
            times = {"ms": _from_json(point["ms"]), "steps": _from_json(point["steps"])}
            points.append(_POINT.validate_python(point | times))
        refused = {int(rows): str(reason) for rows, reason in content["refused"].items()}
        return cls(tuple(points), str(content["source"]), refused)


def write_costs(directory: Path, cost: IterationCost) -> None:
    """Write the file of a run, whole or not at all."""
    content = json.dumps(cost.as_json(), indent=1, allow_nan=False)
    replace_file(directory / COSTS_FILE, f"{content}\n".encode())


def ratio(numerator: Interval, denominator: Interval) -> Interval:
    """The ratio of two independent numbers: distances to their bounds are added in squares, as logarithms."""
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
    """The median, with an interval between two of the values, which holds whatever their distribution is."""
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


def _from_json(content: Mapping[str, Any] | None) -> Interval:
    if content is None:
        return Interval()
    numbers = [content.get(name) for name in ("estimate", "low", "high")]
    if any(number is not None and not 0 < number < math.inf for number in numbers):
        raise ValueError(f"a time is not positive: {content}")
    estimate, low, high = (math.nan if number is None else float(number) for number in numbers)
    return Interval(estimate, low, high, Coverage.read(content.get("covers")))
