"""Draws plots as SVG that is readable on light and dark pages.

With the style `drawing.mplstyle`, backgrounds are transparent, axes are grey, text stays text, and the same figures
give the same bytes. The whiskers in tables are not drawn here, but by the template of the HTML page.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.reporting.table import in_lines
from harness.results.statistics.interval import Interval

# The most curves in a plot, because a reader cannot distinguish more.
_MOST_CURVES = 6
# The most plots of one kind on a page.
MOST_PLOTS = 12

# The styles of curves, in this order; they can also be distinguished in black and white.
_DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
_STYLES = [
    {"marker": marker, "linestyle": dash} for marker, dash in zip("os^DvP", _DASHES, strict=True)
]
# The width of a plot in inches: that of a telephone's screen, so that a telephone need not shrink the letters.
_WIDTH = 4.4
# The most characters of a line of the legend, for this width.
_LONGEST_LINE = 56


class Plot(NamedTuple):
    """A matplotlib figure, and the title above it."""

    title: str
    figure: Figure


# The points of each curve, by the name of the curve. A point is x, and a value with its bounds.
Curves = Mapping[str, Sequence[tuple[float, Interval]]]


def as_svgs(
    make: Callable[[], Mapping[str, Sequence[Plot]]],
) -> dict[str, list[tuple[str, str]]]:
    """The title and the SVG of each plot that `make` returns, by the kind of plot. `make` is called with our own style
    in effect, because matplotlib applies a style when a figure is made.
    """
    drawn: dict[str, list[tuple[str, str]]] = {}
    with _own_style():
        for name, plots in make().items():
            for index, plot in enumerate(plots, 1):
                svg = _svg(f"{name}-{index}", plot.figure)
                drawn.setdefault(name, []).append((plot.title, svg))
    return drawn


def curve_plots(
    panels: Sequence[tuple[str, str, Curves]],
    x_label: str,
    *,
    doubling: bool = False,
) -> list[Plot]:
    """Draw speed-ups with their bounds: a plot for each panel that has points, all on the same scale of speed-ups. Only
    the first `MOST_PLOTS` such panels are drawn, and only the first `_MOST_CURVES` curves of each. A bound that is far
    above all speed-ups is cut off.

    Args:
        panels: the title, the label of the speed-ups' axis, and the curves of each plot.
        doubling: whether x has a logarithmic scale (base 2).
    """
    drawn = []
    for title, y_label, curves in panels:
        shown = [(name, points) for name, points in curves.items() if points][:_MOST_CURVES]
        if shown:
            drawn.append((title, y_label, shown))
    del drawn[MOST_PLOTS:]
    estimates, ends = [1.0], [1.0]
    for _, _, shown in drawn:
        for _, points in shown:
            for _, value in points:
                estimates.append(value.estimate)
                ends += [value.estimate, value.high]
    top = 1.08 * min(np.nanmax(ends), 2 * np.nanmax(estimates))
    plots = []
    for title, y_label, shown in drawn:
        num_lines = sum(wrapped(name).count("\n") + 1 for name, _ in shown)
        figure = Figure(figsize=(_WIDTH, 2.7 + 0.2 * num_lines), layout="constrained")
        # `Any`, because matplotlib's type annotations differ between its versions.
        axes: Any = figure.subplots()
        axes.set(xlabel=x_label, ylabel=y_label)
        xs = sorted({x for _, points in shown for x, _ in points})
        axes.set(ylim=(0, top), xlim=(0.5, xs[-1] + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if doubling:
            axes.set_xscale("log", base=2)
            axes.set_xticks(xs, [f"{x:g}" for x in xs])
            axes.set_xlim(xs[0] / 1.3, xs[-1] * 1.3)
        axes.grid(axis="y")
        axes.axhline(1, color="C5", linewidth=1, linestyle=(0, (3, 2)))
        for (name, points), style in zip(shown, _STYLES, strict=False):
            axes.errorbar(
                [x for x, _ in points],
                [value.estimate for _, value in points],
                # Without bounds these are nan, and nothing is drawn.
                yerr=[
                    [value.estimate - value.low for _, value in points],
                    [value.high - value.estimate for _, value in points],
                ],
                label=wrapped(name),
                elinewidth=2,
                **style,
            )
        figure.legend(loc="outside lower left", handlelength=2.4)
        plots.append(Plot(title, figure))
    return plots


@contextmanager
def _own_style() -> Iterator[None]:
    """Use the style of `drawing.mplstyle` within the block, whatever style the user has set."""
    # When matplotlib draws the first figure on a machine, it makes a list of fonts, and logs a message about it.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(), warnings.catch_warnings():
        # If matplotlib's font lacks a character, the browser still shows it, because text stays text.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        # Intervals over few prompts may be so wide that the labels leave no room for the plot.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        # A user's own matplotlibrc is ignored.
        matplotlib.rcdefaults()
        matplotlib.style.use(Path(__file__).with_suffix(".mplstyle"))
        yield


def wrapped(label: str) -> str:
    """A label, wrapped to lines that fit a figure."""
    return in_lines(" ".join(re.sub(r"[\x00-\x1f\x7f]", " ", label).split()), _LONGEST_LINE)


def _svg(name: str, figure: Figure) -> str:
    """A figure as SVG, without prologue and metadata.

    Its ids begin with `name`, so that they differ from the ids of other plots on the page.
    """
    buffer = io.StringIO()
    # Without metadata, because the result must not depend on the time.
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = buffer.getvalue()
    without_prologue = text[text.index("<svg") :]
    ids = re.compile(r'\bid="|href="#|url\(#')
    # Ids occur only within tags. The text between tags, such as the name of a model, must not be changed.
    return re.sub(r"<[^>]+>", lambda tag: ids.sub(rf"\g<0>{name}-", tag[0]), without_prologue)
