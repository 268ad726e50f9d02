"""The plots of `latency`: the speed-up by K and by load, and what an iteration costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from harness.commands.latency.ranking.pairs import latency_pairs
from harness.commands.latency.tables.costs import measured_over_k
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
from harness.results.runs import Run

# Rows that a slide has room for.
_MOST_BARS = 12
# Between lines at one K.
_BESIDE = 0.07


def latency_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """Speed-ups of pairs by K, and by load with the line where speculation stops to pay; iterations by K."""
    pairs = latency_pairs(runs)
    if pairs.empty:
        return {}
    complete = pairs[pairs.speedup.notna()]
    panels = [_against_k(group) for _, group in complete.groupby("target", sort=False)]
    by_k = [panel for panel in panels if panel is not None][:MOST_PLOTS]
    by_load: list[Plot] = []
    # A damaged file may hold any number.
    for unit, of_unit in complete[complete.load > 0].groupby("unit_of_load", sort=False):
        several = of_unit[of_unit.groupby("curve").load.transform("nunique") > 1]
        curves = {}
        for _, curve in [*several.groupby("curve", sort=False)][:MOST_CURVES]:
            # Of several K, or circumstances, at one load the best.
            at_load = curve.loc[curve.groupby("load").speedup.idxmax()]
            name = at_load["name"].iloc[0]
            details = [text for column, text in name.settings.items() if column != "batch_size"]
            curves[" · ".join([name.pair, *details])] = _points(at_load.itertuples(), "load")
        if curves:
            by_load += curve_plots([("", curves)], str(unit), doubling=True)
    costs = [_costs(group) for _, group in complete.groupby("target", sort=False)]
    of_iteration = [panel for panel in costs if panel[1]][:MOST_PLOTS]
    drafted, steps = "draft tokens of an iteration", "what it costs, regular steps"
    return {
        "num_draft_tokens": curve_plots(by_k, "K, draft tokens per iteration"),
        "load": by_load,
        "iteration": curve_plots(of_iteration, drafted, steps),
    }


def speedup_bars(runs: Sequence[Run]) -> Plot | None:
    """A bar for each pair, the fastest first, with its speed-up and interval; None where none is known."""
    pairs = latency_pairs(runs)
    known = pairs[pairs.speedup.notna()] if not pairs.empty else pairs
    if known.empty:
        return None
    ordered = known.sort_values("speedup", ascending=False, kind="stable")[:_MOST_BARS]
    bars = []
    for pair in ordered.itertuples():
        speedup = pair.verdict.speedup
        colour = {"faster": "C2", "slower": "C1"}.get(pair.verdict.conclusion, "C5")
        bounds = f" ({speedup.low:.2f} to {speedup.high:.2f})" if speedup.has_bounds else ""
        point = Point(speedup.estimate, speedup.low, speedup.high, 0)
        bars.append((pair.name.label(", "), f"{speedup.estimate:.2f}×{bounds}", point, colour))
    title = title_of_many([pair.row for pair in ordered.itertuples()])
    return Plot(title, bar_figure(bars, "speed-up over regular decoding, 95 % intervals"))


def _points(pairs: Iterable[Any], x: str) -> list[Point]:
    speedups = [(pair.verdict.speedup, getattr(pair, x)) for pair in pairs]
    return [Point(speedup.estimate, speedup.low, speedup.high, x) for speedup, x in speedups]


def _against_k(group: pd.DataFrame) -> tuple[str, Curves] | None:
    """Title and curves of a target's pairs, a line for each draft; None where none was measured with several K."""
    several = group.groupby("series").k_order.transform("nunique") > 1
    is_number = group.k_order.map(math.isfinite) & (group.k_order > 0)
    if not (several & is_number).any():
        return None
    names = [*group["name"]]
    shared = {
        column: text
        for column, text in names[0].settings.items()
        if all(name.settings.get(column) == text for name in names)
    }
    title = ", ".join([group.iloc[0].model, *shared.values()])
    curves: dict[str, Sequence[Point]] = {}
    numbered = group[is_number]
    for _, series in numbered.groupby("series", sort=False):
        name = series.iloc[0]["name"]
        own = [text for column, text in name.settings.items() if column not in shared]
        curves[" · ".join([name.pair, *own])] = _points(series.itertuples(), "k")
    if len(curves) > MOST_CURVES:
        title += f" (the first {MOST_CURVES} of {len(curves)})"
    shown: dict[str, Sequence[Point]] = {}
    for place, (label, points) in enumerate([*curves.items()][:MOST_CURVES]):
        # Beside each other, so that intervals at one K do not hide each other.
        shown[label] = [point._replace(x=point.x + _BESIDE * place) for point in points]
    return title, shown


def _costs(group: pd.DataFrame) -> tuple[str, Curves]:
    """Title and curves of what an iteration costs, a curve for each draft with several K, and the line through it where
    the times are one.
    """
    curves: dict[str, Sequence[Point]] = {}
    for _, series in group.groupby("series", sort=False):
        cost = measured_over_k([*series.run])
        load = cost.loads[0] if cost.loads else 1
        shape = cost.shape(load)
        known = [one for one in cost.points if one.width > 1 and one.steps.is_known]
        if shape is None or not known or len(curves) >= MOST_CURVES:
            continue
        name = series.iloc[0]["name"].pair
        curves[name] = [
            Point(one.steps.estimate, one.steps.low, one.steps.high, one.drafted)
            for one in sorted(known, key=lambda one: one.width)
        ]
        step_ms = cost.step_ms(load).estimate
        if shape.fixed is not None and shape.per_token is not None and shape.tested:
            fixed, slope = (one.estimate / step_ms for one in (shape.fixed, shape.per_token))
            line = [(fixed + slope * x, x) for x in (curves[name][0].x, curves[name][-1].x)]
            label = f"{fixed:.2f} steps and {slope:.2f} per draft token"
            curves[label] = [Point(y, math.nan, math.nan, x) for y, x in line]
    return str(group.iloc[0].model), curves
