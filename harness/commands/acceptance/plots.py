"""The pictures of `acceptance`: expected speed-up against K, a curve for each draft; and checkpoints of a training."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from harness.commands.acceptance.tables import best_row, curve_names
from harness.reporting.drawing import MOST_CURVES, Plot, Point, curve_plots
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.runs import Run
from harness.results.statistics.interval import Interval

# `./step_100`, `runs/a/checkpoint-200`: a directory whose name ends with a number.
_CHECKPOINT = re.compile(r"(.*/\D*)(\d+)/?")


def acceptance_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for the drafts of each target, and one for the checkpoints of each training."""
    panels = []
    trainings: dict[tuple[str, str], dict[int, Run]] = defaultdict(dict)
    for target, of_target in curve_names(runs).items():
        curves = {}
        for name, run in of_target.items():
            curves[name] = _points((row.num_draft_tokens, row.expected_speedup) for row in run.rows)
            draft, _, details = name.partition(" · ")
            if match := _CHECKPOINT.fullmatch(draft):
                trainings[target, f"{match[1]}… {details}"][int(match[2])] = run
            elif match := _CHECKPOINT.fullmatch(target):
                trainings[f"{match[1]}…", name][int(match[2])] = run
        if any(curves.values()):
            panels.append((target, dict([*curves.items()][:MOST_CURVES])))
    labels = ("K, draft tokens per iteration", "expected speed-up")
    plots = {"acceptance": curve_plots(panels, *labels)}

    # Tokens per iteration at the last checkpoint's best K, with the break-even: what an iteration costs.
    panels = []
    for (target, draft), by_step in trainings.items():
        if len(by_step) > 1:
            k = best_row(by_step[max(by_step)].rows).num_draft_tokens
            tokens = []
            costs = []
            for step, run in sorted(by_step.items()):
                row: AcceptanceRow = next(row for row in run.rows if row.num_draft_tokens == k)
                tokens.append((step, row.tokens_per_iteration))
                cost = row.iteration_cost
                costs.append((step, None if cost is None else Interval(cost)))
            accepted = {f"accepted, K={k}": _points(tokens)}
            break_even = {"break-even: speculation pays above": _points(costs)}
            panels.append((f"{target} with {draft}", accepted | break_even))
    plots["checkpoints"] = curve_plots(panels, "checkpoint", "tokens per iteration")
    return plots


def _points(figures: Iterable[tuple[int, Interval | None]]) -> list[Point]:
    """Those that are known, at K or a checkpoint."""
    return [
        Point(figure.estimate, figure.low, figure.high, x)
        for x, figure in figures
        if figure is not None
    ]
