"""The drawing of a map: speed-up by batch size, a curve for each K."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from harness.commands.map.grid import load_of, named_grids
from harness.reporting.drawing import MOST_PLOTS, Plot, curve_plots
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval


def map_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for each context of each map, with the line above which speculation pays."""
    plots: list[Plot] = []
    maps = named_grids(runs)
    for name, points in maps:
        stated = [point for point in points if point.alone.interval.is_known]
        for context, with_context in grouped(stated, attrgetter("context")).items():
            title = f"Speed-up at a context of {context} tokens" if context else "Speed-up"
            curves: dict[str, list[tuple[float, Interval]]] = {}
            for point in with_context:
                name_of_k = f"K={point.k}" if point.k else "its own K"
                curves.setdefault(name_of_k, []).append((point.size, point.alone.interval))
            panel = (f"{name} · {title}" if len(maps) > 1 else title, curves)
            plots += curve_plots([panel], load_of(points), doubling=True)
    return {"map": plots[:MOST_PLOTS]}
