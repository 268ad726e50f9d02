"""The report's plots, as SVG whose colours can be read on a light and on a dark page.

There are two kinds: dots in rows, and curves. Text stays text, and the same figures give the same bytes.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.report.accuracy import merged_rows, named_runs
from harness.report.pairs import MeasuredPair, k_series
from harness.report.predicted_curve import predicted_curve
from harness.report.runs import Run
from harness.report.table import grouped

_MEASURED, _AUTO = "measured, 95 % interval", "K=auto"
# Of series that are in several plots; the curves of others differ in black and white too.
_STYLES: dict[str, dict[str, Any]] = {
    _MEASURED: {"color": "C0", "marker": "o"},
    "predicted": {"color": "C1", "marker": "D", "markerfacecolor": "none"},
    "predicted curve": {"color": "C1", "linestyle": "--"},
    _AUTO: {"color": "C2", "linestyle": "-."},
    "regular": {"color": "C5", "marker": "s"},
    "speculative": {"color": "C0", "marker": "o"},
    "published": {"color": "C1", "marker": "D", "markerfacecolor": "none"},
}
_DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
_OTHER_STYLES = [
    {"marker": marker, "linestyle": dash} for marker, dash in zip("os^DvP", _DASHES, strict=True)
]
# The line of no difference.
_REFERENCE: dict[str, Any] = {"color": "C5", "linewidth": 1, "linestyle": (0, (3, 2))}
# Within a row of dots.
_SHIFTS = {"regular": -0.09, "speculative": 0.09, "published": 0.2}
# A figure is as wide as a telephone, and a screen has room for two. In inches.
_WIDTH = 5.2
_ROW_HEIGHT = 0.46
# Curves that a reader can distinguish in one plot, rows that still make one, panels that still fit a page.
_MOST_CURVES, _MOST_ROWS, _MOST_PANELS = 6, 40, 12
_LONGEST_LABEL = 62
_UNITS = ("requests/s", "requests/s,")


class Point(NamedTuple):
    """A value with its bounds; at `x` on a curve."""

    value: float
    low: float | None = None
    high: float | None = None
    x: float = 0


# A label, and points by the name of their series; and series of more points.
DotRow = tuple[str, Mapping[str, Point]]
Curves = Mapping[str, Sequence[Point]]


def plots(pairs: Sequence[MeasuredPair], accuracy: Sequence[Run]) -> dict[str, list[str]]:
    """Plots of pairs of `latency` and runs of `eval` that have something to show: name -> SVGs."""
    # The first figure ever drawn on a machine makes matplotlib list its fonts, and say so.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has the letters that are missing in matplotlib's font.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        # A user's own matplotlibrc is for other pictures.
        matplotlib.rcdefaults()
        matplotlib.style.use(Path(__file__).with_suffix(".mplstyle"))
        figures = {
            "speedup": _dots(
                _speedups(pairs), "speed-up (1 = as fast as regular decoding)", reference=1
            ),
            "times": _dots(
                _times(pairs), "ms per token ± standard deviation over prompts", from_zero=True
            ),
            "categories": _by_category(pairs),
            "num_draft_tokens": _against_k(pairs),
            "load": _against_load(pairs),
            "throughput": _throughputs(pairs),
            "positions": _by_position(pairs),
            "accuracy": _dots(_accuracies(accuracy), "correct answers, %, with 95 % Wald bounds"),
        }
        return {
            name: [_svg(f"{name}-{number}", figure) for number, figure in enumerate(drawn, 1)]
            for name, drawn in figures.items()
            if drawn
        }


def _measured(pair: MeasuredPair, x: float = 0) -> Point:
    return Point(pair.row.speedup or 0.0, pair.row.speedup_low, pair.row.speedup_high, x)


def _speedups(pairs: Sequence[MeasuredPair]) -> Iterable[DotRow]:
    """Speed-up of each pair at its best K, with its interval, and what theory predicts."""
    for pair in pairs:
        if pair.best:
            predicted = pair.row.predicted_speedup
            points = {_MEASURED: _measured(pair)} | (
                {"predicted": Point(predicted)} if predicted else {}
            )
            yield f"{pair.row.speedup:.2f}×  {pair.name.label()}", points


def _by_category(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """For each pair at its best K the speed-up in every category of prompts, with its interval."""
    figures = []
    for pair in pairs:
        points = {
            f"{of.name} ({of.num_prompts})": Point(
                of.speedup.estimate, of.speedup.low, of.speedup.high
            )
            for of in pair.categories
        }
        rows = [
            (f"{point.value:.2f}×  {name}", {_MEASURED: point}) for name, point in points.items()
        ]
        figures += _dots(rows, f"speed-up of {_shortened(pair.name.label())}", reference=1)
    return figures[:_MOST_PANELS]


def _times(pairs: Sequence[MeasuredPair]) -> Iterable[DotRow]:
    """Milliseconds per token of both arms, with the standard deviation over prompts."""
    for pair in pairs:
        if pair.best or (pair.row.speedup is None and not pair.partial):
            means = [
                (str(row.arm), row.ms_per_token, row.ms_per_token_std or 0.0)
                for row in pair.run.rows
            ]
            points = {
                arm: Point(ms, max(ms - std, ms / 50), ms + std) for arm, ms, std in means if ms
            }
            yield pair.name.label(), points


def _accuracies(runs: Sequence[Run]) -> Iterable[DotRow]:
    """Correct answers of both arms with Wald's bounds; published ones where there are any."""
    for name, run, _ in named_runs(runs):
        points = {}
        for row in merged_rows(run.rows):
            if row.accuracy is not None:
                low, high = (
                    100 * max(0.0, row.wald_low or 0.0),
                    100 * min(1.0, row.wald_high or 1.0),
                )
                points[str(row.arm)] = Point(100 * row.accuracy, low, high)
            if row.published_accuracy is not None:
                points["published"] = Point(100 * row.published_accuracy)
        yield name.label(), points


def _against_k(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """For each pair the measured speed-up against K, and the curve that theory predicts; K=auto is a line across.

    All are to one scale.
    """
    found = []
    for group in k_series(_whole(pairs)):
        numbers = [pair for pair in group if isinstance(pair.name.num_draft_tokens, int)]
        predicted = [Point(value, x=k) for k, value in predicted_curve(group)]
        if numbers and (predicted or len(group) > 1):
            curves = {
                "predicted curve": predicted,
                _MEASURED: [_measured(pair, pair.name.place) for pair in numbers],
            }
            ends = 0.7, max(point.x for points in curves.values() for point in points)
            autos = [pair for pair in group if pair.name.num_draft_tokens == "auto"]
            curves[_AUTO] = [_measured(pair, x) for pair in autos for x in ends]
            found.append((" · ".join(group[0].name.group), curves))
    found = found[:_MOST_PANELS]
    top, label = _top(curves for _, curves in found), "K, draft tokens per iteration"
    return [
        _curves(curves, top, label, "speed-up", _shortened(name)).figure for name, curves in found
    ]


def _whole(pairs: Sequence[MeasuredPair]) -> Iterable[MeasuredPair]:
    return (pair for pair in pairs if pair.row.speedup is not None and not pair.partial)


def _by_load(pairs: Sequence[MeasuredPair], unit: str) -> dict[str, list[MeasuredPair]]:
    """Pairs that differ in their load alone, by name and then by load; where they do.

    Args:
        unit: of the load: requests in flight and requests per second are on different axes.
    """
    alike = grouped(
        (pair for pair in _whole(pairs) if pair.unit_of_load == unit),
        lambda pair: pair.name_without_load.label(),
    )
    found = {name: sorted(group, key=attrgetter("load")) for name, group in alike.items()}
    several = [(name, group) for name, group in found.items() if group[0].load < group[-1].load]
    return dict(several[:_MOST_CURVES])


def _units_of_load(pairs: Sequence[MeasuredPair]) -> list[str]:
    return list(dict.fromkeys(pair.unit_of_load for pair in pairs))


def _against_load(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Measured speed-up against the load, and the line where speculation stops to pay; a figure for each unit."""
    figures = []
    for unit in _units_of_load(pairs):
        curves = {
            name: [_measured(pair, pair.load) for pair in group]
            for name, group in _by_load(pairs, unit).items()
        }
        if not curves:
            continue
        axes = _curves(curves, _top([curves]), unit, "speed-up")
        loads = sorted({point.x for points in curves.values() for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.set_xlim(loads[0] / 1.3, loads[-1] * 1.3)
        figures.append(axes.figure)
    return figures


def _throughputs(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Tokens per second in all against those that one reader gets; each point has its load."""
    figures = []
    families = [
        family for unit in _units_of_load(pairs) for family in _by_load(pairs, unit).items()
    ]
    for name, group in families:
        rate = "/s" if group[0].row.request_rate else ""
        rows = [(row, f"{pair.load:g}{rate}") for pair in group for row in pair.run.rows]
        timed = [(row, load) for row, load in rows if row.tokens_per_second and row.ms_per_token]
        curves: dict[str, list[Point]] = {}
        for row, _ in timed:
            curves.setdefault(str(row.arm), []).append(
                Point(row.tokens_per_second, x=1000 / row.ms_per_token)
            )
        if curves:
            axes = _curves(
                curves, _top([curves]), "tokens/s per user", "tokens/s in all", _shortened(name)
            )
            for row, load in timed:
                place = 1000 / row.ms_per_token, row.tokens_per_second
                axes.annotate(load, place, textcoords="offset points", xytext=(5, 4))
            axes.set_xlim(0, 1.12 * max(1000 / row.ms_per_token for row, _ in timed))
            figures.append(axes.figure)
    return figures


def _by_position(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """How often a draft token is accepted at its position, if it was tested."""
    shown = [pair for pair in pairs if pair.best and pair.row.acceptance_by_position][:_MOST_CURVES]
    rates = {
        pair.name.label(): enumerate(pair.row.acceptance_by_position or [], 1) for pair in shown
    }
    curves = {
        name: [Point(100 * rate, x=at) for at, rate in of if rate is not None]
        for name, of in rates.items()
    }
    labels = "position of the draft token", "accepted of those tested, %"
    # Above 100 only in a file that was damaged.
    top = max([100.0, *(point.value for points in curves.values() for point in points)])
    return [_curves(curves, top, *labels).figure] if shown else []


def _dots(
    rows: Iterable[DotRow], label: str, reference: float | None = None, from_zero: bool = False
) -> list[Figure]:
    """A figure with a row of dots below each label; none without any dots.

    Args:
        reference: where a line marks no difference.
        from_zero: where the axis begins, unless values of different size need a logarithmic one.
    """
    rows = [row for row in rows if row[1]][:_MOST_ROWS]
    if not rows:
        return []
    axes = _axes(_ROW_HEIGHT * len(rows) + 0.95, xlabel=label)
    axes.set(yticks=[], ylim=(len(rows) - 0.6, -0.75))
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    for y, (name, _) in enumerate(rows):
        axes.text(0, y - 0.42, _shortened(name), transform=axes.get_yaxis_transform(), va="center")
    for series, style in _STYLES.items():
        found = [
            (y + _SHIFTS.get(series, 0), points[series])
            for y, (_, points) in enumerate(rows)
            if series in points
        ]
        if found:
            places, points = zip(*found, strict=True)
            values, bounds, _ = _arrays(points)
            axes.errorbar(
                values, places, xerr=bounds, label=series, linestyle="none", elinewidth=2, **style
            )
    shown = [point.value for _, points in rows for point in points.values()]
    if from_zero and max(shown) > 20 * min(shown):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    elif from_zero:
        axes.set_xlim(left=0)
    if reference is not None:
        axes.axvline(reference, **_REFERENCE)
    return [_with_legend(axes).figure]


def _curves(curves: Curves, top: float, x_label: str, y_label: str, title: str = "") -> Any:
    """The axes of a figure with these curves and their bounds, from 0 to `top`."""
    curves = {name: points for name, points in curves.items() if points}
    of_pairs = not set(curves) <= set(_STYLES)
    axes = _axes(2.8 + 0.2 * len(curves) * of_pairs, xlabel=x_label, ylabel=y_label, title=title)
    last = max((point.x for points in curves.values() for point in points), default=1)
    axes.set(ylim=(0, top), xlim=(0.5, last + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    if y_label == "speed-up":
        axes.axhline(1, **_REFERENCE)
    for (name, points), other in zip(curves.items(), _OTHER_STYLES, strict=False):
        values, bounds, xs = _arrays(points)
        style = _STYLES.get(name, other)
        axes.errorbar(
            xs, values, yerr=bounds, label=_shortened(name), elinewidth=2, clip_on=False, **style
        )
    return _with_legend(axes, columns=1 if of_pairs else 3)


def _arrays(points: Sequence[Point]) -> tuple[Any, Any, Any]:
    """Values, the lengths of their bounds to both sides [2, num_points], and places on a curve.

    Bounds that are None become NaN and are not drawn. One on the wrong side of its value, in a file that was damaged,
    has no length.
    """
    values, low, high, places = np.array(points, dtype=float).T
    return values, np.maximum([values - low, high - values], 0), places


def _top(found: Iterable[Curves]) -> float:
    """A little above all points and their bounds."""
    points = [point for curves in found for of in curves.values() for point in of]
    return 1.08 * max([1.0, *(point.high or point.value for point in points)])


def _axes(height: float, **labels: str) -> Any:
    # `Any`, because the names that matplotlib's types know differ from version to version.
    axes: Any = Figure(figsize=(_WIDTH, height), layout="constrained").subplots()
    axes.set(**labels)
    return axes


def _with_legend(axes: Any, columns: int = 3) -> Any:
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=columns,
        handlelength=2.4,
        columnspacing=1.4,
    )
    return axes


def _shortened(label: str) -> str:
    """On one line, and short enough for a figure; the tables have the whole names."""
    label = " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", label).split())
    if len(label) > _LONGEST_LABEL:
        # The last part of a path says most; a unit is none.
        words = label.split(" ")
        label = " ".join(
            word if word in _UNITS else word.rstrip("/").rpartition("/")[2] or word
            for word in words
        )
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"


def _svg(name: str, figure: Figure) -> str:
    """Without prologue, and with ids that no other plot has; only tags have ids, names may hold anything."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(
        buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    ids = re.compile(r'\bid="|href="#|url\(#')
    return re.sub(
        r"<[^>]+>", lambda tag: ids.sub(rf"\g<0>{name}-", tag[0]), svg[svg.index("<svg") :]
    )
