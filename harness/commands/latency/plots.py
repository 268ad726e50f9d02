"""The plots of `latency`: the speed-up by K and by load."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

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
    """Speed-ups of pairs by K, and by load with the line where speculation stops to pay."""
    complete = [pair for pair in pairs if pair.speedup is not None]
    targets = [*grouped(complete, attrgetter("series")).values()]
    by_k = []
    for group in targets:
        numbered = [pair for pair in group if isinstance(pair.k, int) and pair.k > 0]
        title = " · ".join([group[0].model, *shared_details(group)])
        by_k.append((title, _curves(numbered, "name.group", "name.k_order")))
    # A damaged file may hold any number.
    loaded = [pair for pair in complete if pair.load > 0]
    by_load: list[Plot] = []
    by_prompts = grouped(loaded, attrgetter("row.prompts"))
    for prompts, alike in by_prompts.items():
        title = f"prompts {prompts}" if len(by_prompts) > 1 else ""
        panel = (title, _curves(alike, "curve_of_k", "load"))
        by_load += curve_plots([panel], "requests in flight, or rows of a batch", doubling=True)
    return {
        "num_draft_tokens": curve_plots(by_k, "K, draft tokens per iteration"),
        "load": by_load,
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
