"""The picture of `acceptance`: expected speed-up against K, a curve for each draft."""

from __future__ import annotations

from collections.abc import Sequence

from harness.commands.acceptance.figures import drafts_of
from harness.reporting.drawing import MOST_CURVES, Plot, Point, curve_plots
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.runs import Run, grouped


def acceptance_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for the drafts of each target."""
    panels = []
    drafts = drafts_of(runs)
    for target, with_target in grouped(drafts, lambda draft: str(draft.best.model)).items():
        curves = {draft.name: _points(draft.run.rows) for draft in with_target}
        if any(curves.values()):
            panels.append((target, dict([*curves.items()][:MOST_CURVES])))
    labels = ("K, draft tokens per iteration", "expected speed-up")
    return {"acceptance": curve_plots(panels, *labels)}


def _points(rows: Sequence[AcceptanceRow]) -> list[Point]:
    """Those that are known."""
    speedups = ((row.expected_speedup, int(row.num_draft_tokens or 0)) for row in rows)
    return [
        Point(speedup.estimate, speedup.low, speedup.high, k) for speedup, k in speedups if speedup
    ]
