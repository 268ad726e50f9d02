"""The report's plots, as SVG for an HTML page that says what their colours are, in the light and in the dark.

matplotlib draws in colours that stand for roles; `_as_part_of_a_page` puts CSS variables in their place. Text stays
text, and the same figures give the same bytes.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.results.report.checks import merged_rows
from harness.results.report.pairs import Line, best_lines, groups, predicted_curve

# Colours that nothing else has, and what each stands for.
_ROLES = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--grid)",
    "#040404": "var(--page)",
    **{f"#0{number}0a0a": f"var(--series-{number})" for number in range(1, 7)},
}
_INK, _MUTED, _GRID, _PAGE, *_SERIES = _ROLES
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))

# A figure is as wide as a telephone, and two of them stand side by side on a screen. In inches.
_WIDTH = 5.2
_ROW_HEIGHT = 0.46
# Lines that can still be told apart in one plot, rows that still make one, panels that still fit a page.
_MOST_LINES, _MOST_ROWS, _MOST_PANELS = 6, 40, 12
_LONGEST_LABEL = 62

# `Any`, because the names that matplotlib's types know differ from version to version.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "harness",
    "text.parse_math": False,
    "font.size": 9.5,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def plots(lines: Sequence[Line], accuracy: Sequence[Line]) -> dict[str, list[str]]:
    """Plots that have something to show: name -> SVGs.

    Args:
        lines: of `latency`.
        accuracy: lines of `eval`.
    """
    # The first figure ever drawn on a machine makes matplotlib list its fonts, and say so.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has the letters that the font which matplotlib measures with has not.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        # A user's own matplotlibrc is for other pictures.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figures: dict[str, Sequence[Figure | None]] = {
            "speedup": [_speedups(lines)],
            "times": [_times(lines)],
            "num_draft_tokens": _against_k(lines),
            "positions": [_by_position(lines)],
            "accuracy": [_accuracies(accuracy)],
        }
        return {
            name: svgs
            for name, drawn in figures.items()
            if (svgs := [_svg(f"{name}-{number}", one) for number, one in enumerate(drawn, 1) if one is not None])
        }


def _speedups(lines: Sequence[Line]) -> Figure | None:
    """Speed-up of each pair at its best K, with interval; beside it what theory predicts."""
    shown = best_lines(lines)[:_MOST_ROWS]
    if not shown:
        return None
    figure, axes = _rows([line.label() for line in shown], [f"{line.speedup:.2f}×" for line in shown])
    for y, row in enumerate(line.row for line in shown):
        low, high, predicted = (row.get(k) for k in ("speedup_low", "speedup_high", "predicted_speedup"))
        if low is not None and high is not None:
            axes.plot([low, high], [y, y], color=_SERIES[0], linewidth=2, solid_capstyle="butt")
        label = None if y else "measured, 95 % interval"
        axes.plot(row["speedup"], y, "o", color=_SERIES[0], markersize=6.5, label=label)
        if predicted is not None:
            axes.plot(predicted, y, **_HOLLOW, label=None if _labelled(axes, "predicted") else "predicted")
    axes.axvline(1, color=_MUTED, linewidth=1, linestyle=(0, (3, 2)))
    _fit(axes, including=1.0)
    axes.set_xlabel("speed-up (1 = as fast as regular decoding)")
    _legend(figure, axes)
    return figure


def _times(lines: Sequence[Line]) -> Figure | None:
    """Milliseconds a token of both arms, with the standard deviation over prompts."""
    shown = (best_lines(lines) + [line for line in lines if line.speedup is None and not line.partial])[:_MOST_ROWS]
    if not shown:
        return None
    figure, axes = _rows([line.label() for line in shown], ["" for _ in shown])
    values = []
    for y, line in enumerate(shown):
        arms = [(line.regular, "regular", _MUTED, "s", -0.09), (line.row, "speculative", _SERIES[0], "o", 0.09)]
        for row, name, colour, marker, shift in arms:
            if row is None or row.get("ms_per_token") is None or (name == "speculative" and row is line.regular):
                continue
            mean, std = row["ms_per_token"], row.get("ms_per_token_std") or 0
            values.append(mean)
            axes.plot([max(mean - std, mean / 50), mean + std], [y + shift] * 2, color=colour, linewidth=1.6)
            label = None if _labelled(axes, name) else name
            axes.plot(mean, y + shift, marker, color=colour, markersize=5.5, linestyle="none", label=label)
    if not values:
        return None
    if max(values) > 20 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        _fit(axes, including=0.0)
        axes.set_xlim(left=0)
    axes.set_xlabel("ms a token ± standard deviation over prompts")
    _legend(figure, axes)
    return figure


def _against_k(lines: Sequence[Line]) -> list[Figure]:
    """For each pair the measured speed-up against K, and the curve that theory draws; all to one scale."""
    whole = [line for line in lines if line.speedup is not None and line.num_draft_tokens and not line.partial]
    curves = [(group, predicted_curve(group)) for group in groups(whole)]
    curves = [(group, curve) for group, curve in curves if curve or len(group) > 1][:_MOST_PANELS]
    tops = [line.row.get("speedup_high") or line.speedup or 0.0 for group, _ in curves for line in group]
    highest = 1.08 * max([*tops, *(value for _, curve in curves for _, value in curve)], default=1.0)
    return [_panel(group, curve, highest) for group, curve in curves]


def _panel(group: Sequence[Line], curve: Sequence[tuple[int, float]], highest: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, 2.8), layout="constrained")
    axes: Any = figure.subplots()
    axes.set_title(_shortened(" · ".join([group[0].pair, *group[0].told_apart])))
    axes.grid(axis="y")
    axes.axhline(1, color=_MUTED, linewidth=1, linestyle=(0, (3, 2)))
    if curve:
        axes.plot(
            *zip(*curve, strict=True), color=_SERIES[1], linewidth=1.6, linestyle=(0, (5, 1.5)), label="predicted"
        )
    ks = [line.num_draft_tokens or 0 for line in group]
    for line, k in zip(group, ks, strict=True):
        low, high = line.row.get("speedup_low"), line.row.get("speedup_high")
        if low is not None and high is not None:
            axes.plot([k, k], [low, high], color=_SERIES[0], linewidth=2, solid_capstyle="butt")
    measured = {"color": _SERIES[0], "linewidth": 1, "markersize": 5.5, "label": "measured, 95 % interval"}
    axes.plot(ks, [line.speedup for line in group], "-o", **measured)
    axes.set_xlim(0.5, max([*(k for k, _ in curve), *ks]) + 0.5)
    axes.set_ylim(0, highest)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("K, draft tokens an iteration")
    axes.set_ylabel("speed-up")
    _legend(figure, axes)
    return figure


def _by_position(lines: Sequence[Line]) -> Figure | None:
    """How often a draft token is accepted at its position, if it was tested."""
    shown = [line for line in best_lines(lines) if line.row.get("acceptance_by_position")][:_MOST_LINES]
    if not shown:
        return None
    figure = Figure(figsize=(_WIDTH, 2.7 + 0.2 * len(shown)), layout="constrained")
    axes = figure.subplots()
    longest = 1
    for line, colour, marker, dash in zip(shown, _SERIES, _MARKERS, _DASHES, strict=False):
        rates = [None if rate is None else 100 * rate for rate in line.row["acceptance_by_position"]]
        longest = max(longest, len(rates))
        known = [(place, rate) for place, rate in enumerate(rates, 1) if rate is not None]
        axes.plot(
            *zip(*known, strict=True), color=colour, marker=marker, linestyle=dash, linewidth=1.6, markersize=5.5,
            label=_shortened(line.label()), clip_on=False,
        )  # fmt: skip
    axes.grid(axis="y")
    axes.set_ylim(0, 100)
    axes.set_xlim(0.7, longest + 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position of the draft token")
    axes.set_ylabel("accepted of those tested, %")
    _legend(figure, axes, columns=1)
    return figure


def _accuracies(lines: Sequence[Line]) -> Figure | None:
    """Right answers of both arms with Wald's bounds; published ones where there are any."""
    shown = [line for line in lines if merged_rows(line.run)][:_MOST_ROWS]
    if not shown:
        return None
    figure, axes = _rows([line.label() for line in shown], ["" for _ in shown])
    styles = {"regular": (_MUTED, "s", -0.1), "speculative": (_SERIES[0], "o", 0.1)}
    for y, line in enumerate(shown):
        for row in merged_rows(line.run):
            name = str(row.get("arm"))
            colour, marker, shift = styles.get(name, (_SERIES[2], "^", 0.2))
            low, high = row.get("wald_low"), row.get("wald_high")
            if low is not None and high is not None:
                bounds = [100 * max(0, low), 100 * min(1, high)]
                axes.plot(bounds, [y + shift] * 2, color=colour, linewidth=2, solid_capstyle="butt")
            label = None if _labelled(axes, name) else name
            place = (100 * row["accuracy"], y + shift)
            axes.plot(*place, marker, color=colour, markersize=5.5, linestyle="none", label=label)
            if row.get("published_accuracy") is not None:
                label = None if _labelled(axes, "published") else "published"
                axes.plot(100 * row["published_accuracy"], y + shift, **_HOLLOW, label=label)
    _fit(axes, including=None)
    low, high = axes.get_xlim()
    axes.set_xlim(max(0, low), min(100, high) + 0.01)
    axes.set_xlabel("right answers, %, with 95 % Wald bounds")
    _legend(figure, axes)
    return figure


_HOLLOW: Mapping[str, Any] = {
    "marker": "D",
    "linestyle": "none",
    "markersize": 6,
    "markerfacecolor": _PAGE,
    "markeredgecolor": _SERIES[1],
    "markeredgewidth": 1.6,
}


def _rows(labels: Sequence[str], values: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with a row for each label, which stands above what will be drawn, and a value at the right end."""
    figure = Figure(figsize=(_WIDTH, _ROW_HEIGHT * len(labels) + 0.95), layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(len(labels) - 0.6, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    for y, (label, value) in enumerate(zip(labels, values, strict=True)):
        # On a ground of their own, so that no line runs through them.
        ground = {"facecolor": _PAGE, "edgecolor": "none", "pad": 1}
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "bbox": ground}
        axes.text(0, y - 0.42, _shortened(label), **place)
        axes.text(1, y - 0.42, value, ha="right", weight="bold", **place)
    return figure, axes


def _fit(axes: Axes, including: float | None) -> None:
    """Room around what is drawn, and around one more value."""
    lines: Any = axes.get_lines()
    drawn = [float(x) for line in lines for x in line.get_xdata()]
    drawn += [] if including is None else [including]
    room = 0.06 * (max(drawn) - min(drawn)) or 0.1
    axes.set_xlim(min(drawn) - room, max(drawn) + room)


def _labelled(axes: Axes, label: str) -> bool:
    return label in axes.get_legend_handles_labels()[1]


def _legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=2.4, columnspacing=1.4)


def _shortened(label: str) -> str:
    """On one line, and short enough for a figure; the tables have names in full."""
    label = " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", label).split())
    if len(label) > _LONGEST_LABEL:
        # Of a path the last part says most.
        label = " ".join(part.rstrip("/").rpartition("/")[2] or part for part in label.split(" "))
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"


def _svg(name: str, figure: Figure) -> str:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _as_part_of_a_page(name, buffer.getvalue())


def _as_part_of_a_page(name: str, svg: str) -> str:
    """Without a size, a prologue or rules of its own, with CSS variables as colours and names of its own."""
    svg = svg[svg.index("<svg") :]
    for alone in ("metadata", "style"):
        svg = re.sub(rf"<{alone}\b.*?</{alone}>\s*", "", svg, flags=re.DOTALL)
    root, rest = svg.split(">", 1)
    root = re.sub(r' (?:width|height|version|xmlns(?::\w+)?)="[^"]*"', "", root)
    root = root.replace(
        "<svg", f'<svg class="plot" id="plot-{name}" role="img" aria-labelledby="caption-{name.rpartition("-")[0]}"'
    )

    def of_the_page(tag: re.Match[str]) -> str:
        text = re.sub(r"\bid=\"|href=\"#|url\(#", rf"\g<0>{name}-", tag[0]).replace("xlink:href", "href")
        text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
        return re.sub(r"#0\w0\w0\w", lambda colour: _ROLES.get(colour[0], colour[0]), text)

    # Tags alone: what a user named may hold anything.
    return root + ">" + re.sub(r"<[^>]+>", of_the_page, rest)
