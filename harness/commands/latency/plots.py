"""The plots of `latency`: the speed-up by K and by load, and what an iteration costs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from harness.commands.latency.costs import measured_over_k
from harness.commands.latency.ranking import RankedRun, ranked_runs, shared_details
from harness.measuring.rows import LatencyRow
from harness.reporting.drawing import (
    Curves,
    Plot,
    bar_figure,
    curve_plots,
)
from harness.reporting.page import title_of_many
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval

# Rows that a slide has room for.
_MOST_BARS = 12


def latency_plots(pairs: Sequence[RankedRun]) -> dict[str, list[Plot]]:
    """Speed-ups of pairs by K, and by load with the line where speculation stops to pay; iterations by K."""
    complete = [pair for pair in pairs if pair.speedup is not None]
    targets = [*grouped(complete, attrgetter("series")).values()]
    by_k = []
    costs = []
    for group in targets:
        numbered = [pair for pair in group if isinstance(pair.k, int) and pair.k > 0]
        title = " · ".join([group[0].model, *shared_details(group)])
        by_k.append((title, _curves(numbered, "name.group", "name.k_order")))
        costs.append((title, _costs(group)))
    # A damaged file may hold any number.
    loaded = [pair for pair in complete if pair.load > 0]
    by_load: list[Plot] = []
    for unit, pairs_of_unit in grouped(loaded, attrgetter("unit_of_load")).items():
        panel = ("", _curves(pairs_of_unit, "curve_of_k", "load"))
        by_load += curve_plots([panel], unit, doubling=True)
    steps = "what it costs, regular steps"
    return {
        "num_draft_tokens": curve_plots(by_k, "K, draft tokens per iteration"),
        "load": by_load,
        "iteration": curve_plots(costs, "draft tokens of an iteration", steps),
    }


def _curves(pairs: Sequence[RankedRun], series: str, x: str) -> Curves:
    """The speed-ups of each series that has several x; at one x that of the last.

    Args:
        series, x: paths of attributes of a pair.
    """
    curves: dict[str, Sequence[tuple[float, Interval]]] = {}
    for names, members in grouped(pairs, attrgetter(series)).items():
        by_x = {attrgetter(x)(pair): pair.interval for pair in members}
        if len(by_x) > 1:
            curves[" · ".join(names)] = [*by_x.items()]
    return curves


def speedup_bars(runs: Sequence[Run[LatencyRow]]) -> Plot | None:
    """A bar for each pair, the fastest first, with its speed-up and interval; None where none is known."""
    compared = [pair for pair in ranked_runs(runs) if pair.speedup is not None]
    if not compared:
        return None
    ordered = sorted(compared, key=attrgetter("speedup"), reverse=True)[:_MOST_BARS]
    bars = []
    for pair in ordered:
        bars.append((pair.name.label(", "), pair.member.verdict))
    title = title_of_many([pair.row for pair in ordered])
    about = "speed-up over regular decoding, 95 % intervals"
    family = max(pair.member.verdict.family for pair in ordered)
    if family > 1:
        about += f" for {family} pairs at once"
    return Plot(title, bar_figure(bars, about))


def _costs(group: Sequence[RankedRun]) -> Curves:
    """The cost of an iteration: a curve for each draft with several K, and the line through it where the times are
    one.
    """
    curves: dict[str, Sequence[tuple[float, Interval]]] = {}
    groups = grouped(group, attrgetter("name.group"))
    for names, series in groups.items():
        cost = measured_over_k([pair.run for pair in series])
        shape = cost.shape(cost.loads[0]) if cost.loads else None
        priced = [point for point in cost.points if point.width > 1 and point.steps.is_known]
        if shape is None or not priced:
            continue
        points = [(point.drafted, point.steps) for point in priced]
        curves[" · ".join(names)] = points
        if shape.fixed is not None and shape.per_token is not None and shape.tested:
            step_ms = cost.point(0, cost.loads[0]).ms.estimate
            fixed = shape.fixed.estimate / step_ms
            slope = shape.per_token.estimate / step_ms
            line = f"{fixed:.2f} steps and {slope:.2f} per draft token"
            label = line if len(groups) == 1 else " · ".join([*names, line])
            ends = (priced[0].drafted, priced[-1].drafted)
            curves[label] = [(x, Interval(fixed + slope * x)) for x in ends]
    return curves
