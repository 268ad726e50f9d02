"""The drawing of a map: speed-up by batch size, a curve for each K."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from harness.commands.map.grid import load_of, named_points
from harness.reporting.drawing import MOST_PLOTS, Plot, curve_plots
from harness.reporting.drawing import Point as PlotPoint
from harness.results.runs import Run, grouped


def map_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for each context of each map, with the line above which speculation pays."""
    plots: list[Plot] = []
    maps = named_points(runs)
    for name, points in maps.items():
        known = [point for point in points if point.verdict.speedup.is_known]
        for context, with_context in grouped(known, attrgetter("context")).items():
            title = f"Speed-up at a context of {context} tokens" if context else "Speed-up"
            curves: dict[str, list[PlotPoint]] = {}
            for point in with_context:
                speedup = point.verdict.speedup
                drawn = PlotPoint(speedup.estimate, speedup.low, speedup.high, point.size)
                curves.setdefault(f"K={point.k}" if point.k else "its own K", []).append(drawn)
            panel = (f"{name} · {title}" if len(maps) > 1 else title, curves)
            plots += curve_plots([panel], load_of(points), doubling=True)
    return {"map": plots[:MOST_PLOTS]}
