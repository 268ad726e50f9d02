"""The plots of `latency`: the speed-up by K and by load, and what an iteration costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
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

# Rows that a slide has room for.
_MOST_BARS = 12
# Between lines at one K.
_BESIDE = 0.07


def latency_plots(pairs: Sequence[RankedRun]) -> dict[str, list[Plot]]:
    """Speed-ups of pairs by K, and by load with the line where speculation stops to pay; iterations by K."""
    complete = [pair for pair in pairs if pair.speedup is not None]
    targets = [*grouped(complete, attrgetter("target")).values()]
    by_k = [panel for panel in map(_against_k, targets) if panel is not None]
    by_load: list[Plot] = []
    # A damaged file may hold any number.
    loaded = [pair for pair in complete if pair.load > 0]
    for unit, pairs_of_unit in grouped(loaded, attrgetter("unit_of_load")).items():
        curves: dict[str, Sequence[Point]] = {}
        for curve in grouped(pairs_of_unit, attrgetter("curve")).values():
            by_number = grouped(curve, attrgetter("load"))
            if len(by_number) < 2 or len(curves) >= MOST_CURVES:
                continue
            # Of several K, or circumstances, at one load the best.
            at_load = [max(pairs, key=attrgetter("speedup")) for pairs in by_number.values()]
            name = at_load[0].name
            details = [text for column, text in name.settings.items() if column != "batch_size"]
            curves[" · ".join([name.pair, *details])] = _points(at_load, attrgetter("load"))
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
        point = Point(speedup.estimate, speedup.low, speedup.high, 0)
        bars.append((pair.name.label(", "), f"{speedup:×}", point, colour))
    title = title_of_many([pair.row for pair in ordered])
    return Plot(title, bar_figure(bars, "speed-up over regular decoding, 95 % intervals"))


def _points(pairs: Sequence[RankedRun], x: Callable[[RankedRun], float]) -> list[Point]:
    speedups = [(pair.verdict.speedup, x(pair)) for pair in pairs]
    return [
        Point(speedup.estimate, speedup.low, speedup.high, position)
        for speedup, position in speedups
    ]


def _against_k(group: Sequence[RankedRun]) -> tuple[str, Curves] | None:
    """Title and curves of a target's pairs, a line for each draft; None where none was measured with several K."""
    numbered = [pair for pair in group if isinstance(pair.k, int) and pair.k > 0]
    by_series = [*grouped(numbered, attrgetter("series")).values()]
    several = {
        series
        for series, pairs in grouped(group, attrgetter("series")).items()
        if len({pair.name.k_order for pair in pairs}) > 1
    }
    if not any(pairs[0].series in several for pairs in by_series):
        return None
    shared = _shared_settings(group)
    title = ", ".join([group[0].model, *shared.values()])
    curves: dict[str, Sequence[Point]] = {}
    for pairs in by_series:
        curves[_label(pairs[0], shared)] = _points(pairs, lambda pair: pair.name.k_order)
    if len(curves) > MOST_CURVES:
        title += f" (the first {MOST_CURVES} of {len(curves)})"
    shown: dict[str, Sequence[Point]] = {}
    for index, (label, points) in enumerate([*curves.items()][:MOST_CURVES]):
        # Beside each other, so that intervals at one K do not hide each other.
        shown[label] = [point._replace(x=point.x + _BESIDE * index) for point in points]
    return title, shown


def _shared_settings(group: Sequence[RankedRun]) -> dict[str, str]:
    """The settings in the names of these runs that are the same in all of them, in words, by column."""
    names = [pair.name for pair in group]
    return {
        column: text
        for column, text in names[0].settings.items()
        if all(name.settings.get(column) == text for name in names)
    }


def _label(pair: RankedRun, shared: Collection[str]) -> str:
    """The name of a curve: the pair, and those of its settings that not all have."""
    own = [text for column, text in pair.name.settings.items() if column not in shared]
    return " · ".join([pair.name.pair, *own])


def _costs(group: Sequence[RankedRun]) -> tuple[str, Curves]:
    """Title and curves of what an iteration costs, a curve for each draft with several K, and the line through it where
    the times are one.
    """
    shared = _shared_settings(group)
    curves: dict[str, Sequence[Point]] = {}
    for series in grouped(group, attrgetter("series")).values():
        cost = measured_over_k([pair.run for pair in series])
        load = cost.loads[0] if cost.loads else 1
        shape = cost.shape(load)
        priced = [point for point in cost.points if point.width > 1 and point.steps.is_known]
        if shape is None or not priced or len(curves) >= MOST_CURVES:
            continue
        name = _label(series[0], shared)
        curves[name] = [
            Point(point.steps.estimate, point.steps.low, point.steps.high, point.drafted)
            for point in sorted(priced, key=lambda point: point.width)
        ]
        step_ms = cost.step_ms(load).estimate
        if shape.fixed is not None and shape.per_token is not None and shape.tested:
            fixed, slope = (
                coefficient.estimate / step_ms for coefficient in (shape.fixed, shape.per_token)
            )
            line = [(fixed + slope * x, x) for x in (curves[name][0].x, curves[name][-1].x)]
            label = f"{fixed:.2f} steps and {slope:.2f} per draft token"
            curves[label] = [Point(y, math.nan, math.nan, x) for y, x in line]
    return group[0].model, curves
