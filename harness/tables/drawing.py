"""The two kinds of plots, dots in rows and curves, as SVG that suits light and dark pages.

`plots.py` and `map_plots.py` say what is plotted. By `plots.mplstyle` backgrounds are transparent
and axes grey, text stays text, and the same figures give the same bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MEASURED = "measured, 95 % interval"
AUTO = "K=auto"
# Curves that a reader can distinguish in one plot.
MOST_CURVES = 6

# Styles of the series that are in several plots; dots have these series alone.
_STYLES: dict[str, dict[str, Any]] = {
    MEASURED: {"color": "C0", "marker": "o"},
    "predicted": {"color": "C1", "marker": "D", "markerfacecolor": "none"},
    "predicted curve": {"color": "C1", "linestyle": "--"},
    AUTO: {"color": "C2", "linestyle": "-."},
    "regular": {"color": "C5", "marker": "s"},
    "speculative": {"color": "C0", "marker": "o"},
    "published": {"color": "C1", "marker": "D", "markerfacecolor": "none"},
}
# Curves of other names take these in their order, which differ in black and white too.
_DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
_OTHER_STYLES = [
    {"marker": marker, "linestyle": dash} for marker, dash in zip("os^DvP", _DASHES, strict=True)
]
# The line of no difference.
_REFERENCE: dict[str, Any] = {"color": "C5", "linewidth": 1, "linestyle": (0, (3, 2))}
# Vertical offsets of series within a row of dots.
_SHIFTS = {"regular": -0.09, "speculative": 0.09, "published": 0.2}
# In inches. A figure fits the width of a telephone, and a screen has room for two.
_WIDTH = 5.2
_ROW_HEIGHT = 0.46
_MOST_ROWS = 40
# A label has two lines of this many characters.
_LONGEST_LINE = 62
_MOST_LINES = 2
# Words of a label that have a slash and are no path.
_UNITS = ("requests/s", "requests/s,")


class Point(NamedTuple):
    """A value with its bounds; at `x` on a curve."""

    value: float
    low: float | None = None
    high: float | None = None
    x: float = 0


class DotRow(NamedTuple):
    """One row of dots below its label, a point for each series."""

    label: str
    points: Mapping[str, Point]


# Points by the name of their curve.
Curves = Mapping[str, Sequence[Point]]


def dot_plot(rows: Iterable[DotRow], label: str, reference: float | None = None) -> list[Figure]:
    """Draw a row of dots below each label, for the first 40 rows that have any -> one figure, or none without dots.

    Args:
        reference: where a line marks no difference.
    """
    rows = [row for row in rows if row.points][:_MOST_ROWS]
    if not rows:
        return []
    axes = new_axes(_ROW_HEIGHT * len(rows) + 0.95, xlabel=label)
    axes.set(yticks=[], ylim=(len(rows) - 0.6, -0.75))
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    for y, row in enumerate(rows):
        axes.text(
            0, y - 0.42, wrapped(row.label), transform=axes.get_yaxis_transform(), va="center"
        )
    for series in _STYLES:
        _draw_dots(axes, rows, series)
    if reference is not None:
        axes.axvline(reference, **_REFERENCE)
    add_legend(axes)
    return [axes.figure]


def curve_plot(curves: Curves, top: float, x_label: str, title: str = "") -> Any:
    """Draw speed-ups with their bounds, at most MOST_CURVES -> the axes of a figure, from 0 to `top`."""
    curves = {name: points for name, points in curves.items() if points}
    has_long_names = not set(curves) <= set(_STYLES)
    num_lines = sum(len(wrapped(name).split("\n")) for name in curves)
    legend_height = 0.2 * num_lines if has_long_names else 0
    axes = new_axes(2.8 + legend_height, xlabel=x_label, ylabel="speed-up", title=wrapped(title))
    last = max((point.x for points in curves.values() for point in points), default=1)
    axes.set(ylim=(0, top), xlim=(0.5, last + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.axhline(1, **_REFERENCE)
    for (name, points), other_style in zip(curves.items(), _OTHER_STYLES, strict=False):
        axes.errorbar(
            [point.x for point in points],
            [point.value for point in points],
            yerr=_bounds(points),
            label=wrapped(name),
            elinewidth=2,
            clip_on=False,
            **_STYLES.get(name, other_style),
        )
    add_legend(axes, columns=1 if has_long_names else 3)
    return axes


def top_of(plots: Iterable[Curves]) -> float:
    """A value a little above all points and their bounds, for plots to one scale."""
    highest = 1.0
    for curves in plots:
        for points in curves.values():
            highest = max([highest, *(point.high or point.value for point in points)])
    return 1.08 * highest


def wrapped(label: str) -> str:
    """A label in lines that fit a figure. The tables have it in full."""
    label = " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", label).split())
    lines = _lines(label, max_lines=None)
    if len(lines) > _MOST_LINES:
        label = " ".join(map(_last_of_path, label.split(" ")))
        lines = _lines(label, max_lines=_MOST_LINES)
    return "\n".join(lines)


def _lines(label: str, max_lines: int | None) -> list[str]:
    """Lines that end between parts of the label, as long as a part fits a line."""
    parts = [part.replace(" ", "\N{NO-BREAK SPACE}") for part in label.split(" · ")]
    lines = textwrap.wrap(
        " · ".join(parts),
        _LONGEST_LINE,
        max_lines=max_lines,
        placeholder="…",
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _last_of_path(word: str) -> str:
    """The last part of a path, which says most: `llama` of `./models/llama/`."""
    if word in _UNITS:
        return word
    return word.rstrip("/").rpartition("/")[2] or word


def svg(name: str, figure: Figure) -> str:
    """A figure without prologue and metadata. Its ids begin with `name`, so that they differ from other plots'."""
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=no_metadata)
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    without_prologue = text[text.index("<svg") :]
    ids = re.compile(r'\bid="|href="#|url\(#')
    # Only tags have ids. Text between them, such as the name of a model, stays as it is.
    return re.sub(r"<[^>]+>", lambda tag: ids.sub(rf"\g<0>{name}-", tag[0]), without_prologue)


def _draw_dots(axes: Any, rows: Sequence[DotRow], series: str) -> None:
    """Draw the points of one series, in the rows that have one."""
    points = []
    heights = []
    for y, row in enumerate(rows):
        if series in row.points:
            points.append(row.points[series])
            heights.append(y + _SHIFTS.get(series, 0))
    if not points:
        return
    axes.errorbar(
        [point.value for point in points],
        heights,
        xerr=_bounds(points),
        label=series,
        elinewidth=2,
        **{**_STYLES[series], "linestyle": "none"},
    )


def _bounds(points: Sequence[Point]) -> Any:
    """Distances of the bounds from their values, [2, num_points].

    NaN, which is not drawn, where there is none; 0 for a bound on the wrong side, in a damaged file.
    """
    value, low, high, _ = np.array(points, dtype=float).T
    return np.maximum([value - low, high - value], 0)


def new_axes(height: float, **labels: str) -> Any:
    """The axes of a new figure of this height in inches."""
    # `Any`, because matplotlib's types name different things in different versions.
    axes: Any = Figure(figsize=(_WIDTH, height), layout="constrained").subplots()
    axes.set(**labels)
    return axes


def add_legend(axes: Any, columns: int = 3) -> None:
    """A legend below the axes, of everything there that has a label."""
    axes.figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower left",
        ncols=columns,
        handlelength=2.4,
        columnspacing=1.4,
    )
