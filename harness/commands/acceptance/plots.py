"""The picture of `acceptance`: expected speed-up against K, a curve for each draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.commands.acceptance.figures import curve_names
from harness.reporting.drawing import MOST_CURVES, Plot, Point, curve_plots
from harness.results.runs import Run
from harness.results.statistics.interval import Interval


def acceptance_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for the drafts of each target."""
    panels = []
    for target, of_target in curve_names(runs).items():
        curves = {
            name: _points((row.num_draft_tokens, row.expected_speedup) for row in run.rows)
            for name, run in of_target.items()
        }
        if any(curves.values()):
            panels.append((target, dict([*curves.items()][:MOST_CURVES])))
    labels = ("K, draft tokens per iteration", "expected speed-up")
    return {"acceptance": curve_plots(panels, *labels)}


def _points(figures: Iterable[tuple[int, Interval | None]]) -> list[Point]:
    """Those that are known."""
    return [
        Point(figure.estimate, figure.low, figure.high, x)
        for x, figure in figures
        if figure is not None
    ]
