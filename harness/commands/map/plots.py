"""The drawing of a map: speed-up by batch size and K, in the colour of what each cell says."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from harness.commands.map.grid import (
    CANNOT_TELL,
    DOES_NOT_PAY,
    PAYS,
    Point,
    load_of,
    named_points,
)
from harness.reporting.drawing import MOST_PLOTS, Plot, add_legend, new_axes
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval

# Inches of the plot for each K, and for the axis and the legend.
_ROW_HEIGHT = 0.42
_OTHER_HEIGHT = 1.35
_OPACITY = 0.4
# Points; smaller where many columns leave less room.
_LARGEST_TEXT = 9.0
_TEXT_OF_ALL_COLUMNS = 66.0
_COLOURS = {PAYS: "C2", CANNOT_TELL: "C5", DOES_NOT_PAY: "C1"}


def map_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """A plot for each context of each map."""
    plots = []
    maps = named_points(runs)
    for name, points in maps.items():
        for context, in_context in grouped(points, attrgetter("context")).items():
            title = f"Speed-up at a context of {context} tokens" if context else "Speed-up"
            if len(maps) > 1:
                title = f"{name} · {title}"
            plots.append(Plot(title, _figure(in_context)))
    return {"map": plots[:MOST_PLOTS]}


def _figure(points: Sequence[Point]) -> Figure:
    sizes = sorted({point.size for point in points})
    all_k = sorted({point.k for point in points})
    height = _ROW_HEIGHT * len(all_k) + _OTHER_HEIGHT
    axes = new_axes(height, xlabel=load_of(points), ylabel="K, draft tokens")
    axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(-0.5, len(all_k) - 0.5))
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_yticks(range(len(all_k)), [str(k) if k else "its own" for k in all_k])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    font_size = min(_LARGEST_TEXT, _TEXT_OF_ALL_COLUMNS / len(sizes))
    labels = {point.word: point.word for point in points}
    for point in points:
        x, y = sizes.index(point.size), all_k.index(point.k)
        cell = Rectangle(
            (x - 0.5, y - 0.5),
            1,
            1,
            facecolor=_COLOURS[point.word],
            alpha=_OPACITY,
            linewidth=0,
            label=labels.pop(point.word, None),
        )
        axes.add_patch(cell)
        speedup = Interval(point.verdict.speedup.estimate)
        axes.text(x, y, f"{speedup:×}", ha="center", va="center", fontsize=font_size)
    add_legend(axes)
    return axes.figure
