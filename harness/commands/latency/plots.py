"""The plots of `latency`: the speed-up by K and by load, and what an iteration costs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from harness.commands.latency.tables.costs import measured_over_k
from harness.commands.latency.tables.ranked import RankedRun, ranked_runs
from harness.measuring.rows import LatencyRow
from harness.reporting.drawing import (
    MOST_CURVES,
    MOST_PLOTS,
    Curves,
    Plot,
    Point,
    bar_figure,
    curve_plots,
)
from harness.reporting.page import title_of_many
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval

# Rows that a slide has room for.
_MOST_BARS = 12
# Between lines at one K.
_BESIDE = 0.07


def latency_plots(pairs: Sequence[RankedRun]) -> dict[str, list[Plot]]:
    """Speed-ups of pairs by K, and by load with the line where speculation stops to pay; iterations by K."""
    complete = [pair for pair in pairs if pair.speedup is not None]
    targets = [*grouped(complete, attrgetter("target")).values()]
    by_k = [panel for panel in map(_by_k, targets) if panel[1]]
    by_load: list[Plot] = []
    # A damaged file may hold any number.
    loaded = [pair for pair in complete if pair.load > 0]
    for unit, pairs_of_unit in grouped(loaded, attrgetter("unit_of_load")).items():
        curves = _by_load(pairs_of_unit)
        if curves:
            by_load += curve_plots([("", curves)], unit, doubling=True)
    costs = [panel for panel in map(_costs, targets) if panel[1]]
    drafted, steps = "draft tokens of an iteration", "what it costs, regular steps"
    return {
        "num_draft_tokens": curve_plots(by_k[:MOST_PLOTS], "K, draft tokens per iteration"),
        "load": by_load,
        "iteration": curve_plots(costs[:MOST_PLOTS], drafted, steps),
    }


def speedup_bars(runs: Sequence[Run[LatencyRow]]) -> Plot | None:
    """A bar for each pair, the fastest first, with its speed-up and interval; None where none is known."""
    known = [pair for pair in ranked_runs(runs) if pair.speedup is not None]
    if not known:
        return None
    ordered = sorted(known, key=attrgetter("speedup"), reverse=True)[:_MOST_BARS]
    bars = []
    for pair in ordered:
        speedup = pair.verdict.speedup
        colour = {"faster": "C2", "slower": "C1"}.get(pair.verdict.conclusion, "C5")
        bars.append((pair.name.label(", "), f"{speedup:×}", _point(speedup, 0), colour))
    title = title_of_many([pair.row for pair in ordered])
    return Plot(title, bar_figure(bars, "speed-up over regular decoding, 95 % intervals"))


def _point(value: Interval, x: float) -> Point:
    return Point(value.estimate, value.low, value.high, x)


def _by_k(group: Sequence[RankedRun]) -> tuple[str, Curves]:
    """Title and curves of a target's pairs, one for each draft; without curves where no pair has several K."""
    numbered = [pair for pair in group if isinstance(pair.k, int) and pair.k > 0]
    by_series = grouped(numbered, attrgetter("name.group"))
    title = group[0].model
    if len(by_series) > MOST_CURVES:
        title += f" (the first {MOST_CURVES} of {len(by_series)})"
    curves: dict[str, Sequence[Point]] = {}
    for index, (names, series) in enumerate([*by_series.items()][:MOST_CURVES]):
        # Beside each other, so that intervals at one K do not hide each other.
        curves[" · ".join(names)] = [
            _point(pair.verdict.speedup, pair.name.k_order + _BESIDE * index) for pair in series
        ]
    has_several = any(len({pair.k for pair in series}) > 1 for series in by_series.values())
    return title, curves if has_several else {}


def _by_load(pairs: Sequence[RankedRun]) -> Curves:
    """The curves of pairs with several loads."""
    curves: dict[str, Sequence[Point]] = {}
    for names, curve in grouped(pairs, attrgetter("curve")).items():
        by_number = grouped(curve, attrgetter("load"))
        if len(by_number) > 1 and len(curves) < MOST_CURVES:
            # Of several K, or circumstances, at one load the best.
            best = [max(at_load, key=attrgetter("speedup")) for at_load in by_number.values()]
            curves[" · ".join(names)] = [_point(pair.verdict.speedup, pair.load) for pair in best]
    return curves


def _costs(group: Sequence[RankedRun]) -> tuple[str, Curves]:
    """Title and curves of what an iteration costs, a curve for each draft with several K, and the line through it where
    the times are one.
    """
    curves: dict[str, Sequence[Point]] = {}
    for names, series in grouped(group, attrgetter("name.group")).items():
        cost = measured_over_k([pair.run for pair in series])
        load = cost.loads[0] if cost.loads else 1
        shape = cost.shape(load)
        priced = [point for point in cost.points if point.width > 1 and point.steps.is_known]
        if shape is None or not priced or len(curves) >= MOST_CURVES:
            continue
        points = [
            _point(point.steps, point.drafted)
            for point in sorted(priced, key=lambda point: point.width)
        ]
        curves[" · ".join(names)] = points
        if shape.fixed is not None and shape.per_token is not None and shape.tested:
            step_ms = cost.point(0, load).ms.estimate
            fixed = shape.fixed.estimate / step_ms
            slope = shape.per_token.estimate / step_ms
            label = f"{fixed:.2f} steps and {slope:.2f} per draft token"
            ends = (points[0].x, points[-1].x)
            curves[label] = [_point(Interval(fixed + slope * x), x) for x in ends]
    return group[0].model, curves
