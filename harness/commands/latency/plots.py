"""The plots of `latency`: the speed-up by K and by load."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from harness.commands.latency.ranking import RankedRun, certainty, shared_details
from harness.reporting.drawing import (
    Curves,
    Plot,
    curve_plots,
)
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval


def latency_plots(pairs: Sequence[RankedRun]) -> dict[str, list[Plot]]:
    """Speed-ups of pairs by K and by load, with the line below which speculation does not pay."""
    complete = [pair for pair in pairs if pair.speedup is not None]
    by_k = []
    for group in grouped(complete, attrgetter("series")).values():
        numbered = [pair for pair in group if isinstance(pair.k, int) and pair.k > 0]
        title = " · ".join([group[0].model, *shared_details(group)])
        curves = _curves(numbered, "name.group", "name.k_order")
        by_k.append((title, f"speed-up, {certainty(group)}", curves))
    # A damaged file may hold any number as the load.
    loaded = [pair for pair in complete if pair.load > 0]
    by_load = []
    by_prompts = grouped(loaded, attrgetter("row.prompts"))
    for prompts, alike in by_prompts.items():
        title = f"prompts {prompts}" if len(by_prompts) > 1 else ""
        curves = _curves(alike, "curve_of_k", "load")
        by_load.append((title, f"speed-up, {certainty(alike)}", curves))
    return {
        "num_draft_tokens": curve_plots(by_k, "K, draft tokens per iteration"),
        "load": curve_plots(by_load, "requests in flight, or rows of a batch", doubling=True),
    }


def _curves(pairs: Sequence[RankedRun], series: str, x: str) -> Curves:
    """A curve of speed-ups for each group of pairs with at least two different x.

    If several runs of a group have the same x, all of them are drawn.

    Args:
        series: path of the attribute that is equal within a group.
        x: path of the attribute that is the x of a point.
    """
    curves: dict[str, Sequence[tuple[float, Interval]]] = {}
    for names, members in grouped(pairs, attrgetter(series)).items():
        points = [(attrgetter(x)(pair), pair.verdict.interval) for pair in members]
        if len(dict(points)) > 1:
            curves[" · ".join(names)] = points
    return curves
