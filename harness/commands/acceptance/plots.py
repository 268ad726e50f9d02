"""The pictures of `acceptance`: expected speed-up against K, a curve for each draft; and checkpoints of a training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.commands.acceptance.drift import trainings
from harness.commands.acceptance.figures import curve_names
from harness.reporting.drawing import MOST_CURVES, Plot, Point, curve_plots
from harness.results.runs import Run
from harness.results.statistics.interval import Interval


def acceptance_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for the drafts of each target, and one for the checkpoints of each training."""
    panels = []
    for target, of_target in curve_names(runs).items():
        curves = {
            name: _points((row.num_draft_tokens, row.expected_speedup) for row in run.rows)
            for name, run in of_target.items()
        }
        if any(curves.values()):
            panels.append((target, dict([*curves.items()][:MOST_CURVES])))
    labels = ("K, draft tokens per iteration", "expected speed-up")
    plots = {"acceptance": curve_plots(panels, *labels)}

    panels = []
    for training in trainings(runs):
        tokens = [(one.step, one.tokens) for one in training.checkpoints]
        costs = [
            (one.step, Interval(one.break_even))
            for one in training.checkpoints
            if one.break_even is not None
        ]
        accepted = {f"accepted, K={training.k}, bounds at every look": _points(tokens)}
        break_even = {"break-even: speculation pays above": _points(costs)}
        panels.append((training.name, accepted | break_even))
    plots["checkpoints"] = curve_plots(panels, "checkpoint", "tokens per iteration")
    return plots


def _points(figures: Iterable[tuple[int, Interval | None]]) -> list[Point]:
    """Those that are known, at K or a checkpoint."""
    return [
        Point(figure.estimate, figure.low, figure.high, x)
        for x, figure in figures
        if figure is not None
    ]
