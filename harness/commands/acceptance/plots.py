"""The pictures of `acceptance`: expected speed-up against K, a curve for each draft; and checkpoints of a training."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from harness.commands.acceptance.rows import AcceptanceRow
from harness.commands.acceptance.tables import best_row, curve_names
from harness.commands.read_runs import Run
from harness.tables.drawing import MOST_CURVES, Plot, Point, curve_plots

# `./step_100`, `runs/a/checkpoint-200`: a directory whose name ends with a number.
_CHECKPOINT = re.compile(r"(.*/\D*)(\d+)/?")


def acceptance_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for the drafts of each target, and one for the checkpoints of each training."""
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
    return {"acceptance": curve_plots(panels, *labels), "checkpoints": _checkpoint_plots(runs)}


def _checkpoint_plots(runs: Sequence[Run]) -> list[Plot]:
    """Tokens per iteration at the last checkpoint's best K, with the break-even: what an iteration costs."""
    trainings: dict[tuple[str, str], dict[int, Run]] = defaultdict(dict)
    for model, of_model in curve_names(runs).items():
        for name, run in of_model.items():
            draft, _, details = name.partition(" · ")
            if match := _CHECKPOINT.fullmatch(draft):
                trainings[model, f"{match[1]}… {details}"][int(match[2])] = run
            elif match := _CHECKPOINT.fullmatch(model):
                trainings[f"{match[1]}…", name][int(match[2])] = run
    panels = []
    for (model, draft), by_step in trainings.items():
        if len(by_step) < 2:
            continue
        k = best_row(by_step[max(by_step)].rows).num_draft_tokens
        tokens = []
        costs = []
        for step, run in sorted(by_step.items()):
            row: AcceptanceRow = next(row for row in run.rows if row.num_draft_tokens == k)
            found = row.tokens_per_iteration
            if found is not None:
                tokens.append(Point(found.estimate, found.low, found.high, step))
            if row.iteration_cost is not None:
                costs.append(Point(row.iteration_cost, math.nan, math.nan, step))
        curves = {f"accepted, K={k}": tokens, "break-even: speculation pays above": costs}
        panels.append((f"{model} with {draft}", curves))
    return curve_plots(panels, "checkpoint", "tokens per iteration")
