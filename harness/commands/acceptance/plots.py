"""The picture of `acceptance`: expected speed-up against K, a curve for each draft."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.commands.acceptance.tables import curve_names
from harness.commands.read_runs import Run
from harness.tables.drawing import MOST_CURVES, Point, curve_plot, top_of


def acceptance_plots(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """A figure for the drafts of each target."""
    figures = []
    for target, of_target in curve_names(runs).items():
        curves = {}
        for name, run in list(of_target.items())[:MOST_CURVES]:
            points = []
            for row in run.rows:
                speedup = row.expected_speedup
                if speedup is not None:
                    point = Point(speedup.estimate, x=row.num_draft_tokens)
                    if speedup.has_bounds:
                        point = point._replace(low=speedup.low, high=speedup.high)
                    points.append(point)
            curves[name] = points
        if any(curves.values()):
            axes = curve_plot(curves, top_of([curves]), "K, draft tokens per iteration", target)
            axes.set_ylabel("expected speed-up")
            figures.append(axes.figure)
    return {"acceptance": figures}
