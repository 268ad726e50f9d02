"""The picture of `acceptance`: expected speed-up against K, a curve for each draft."""

from __future__ import annotations

from collections.abc import Sequence

from harness.commands.acceptance.tables import curve_names
from harness.commands.read_runs import Run
from harness.tables.drawing import MOST_CURVES, Plot, Point, curve_plots


def acceptance_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for the drafts of each target."""
    panels = []
    for target, of_target in curve_names(runs).items():
        curves = {}
        for name, run in list(of_target.items())[:MOST_CURVES]:
            points = []
            for row in run.rows:
                speedup = row.expected_speedup
                if speedup is not None:
                    point = Point(speedup.estimate, speedup.low, speedup.high, row.num_draft_tokens)
                    points.append(point)
            curves[name] = points
        if any(curves.values()):
            panels.append((target, curves))
    labels = ("K, draft tokens per iteration", "expected speed-up")
    return {"acceptance": curve_plots(panels, *labels)}
