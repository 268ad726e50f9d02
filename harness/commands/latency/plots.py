"""The report's plots: pairs of `latency` and runs of `eval`; `map_plots.py` draws maps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

import matplotlib
import matplotlib.style
from matplotlib.figure import Figure

from harness.commands.eval.tables import merged_rows
from harness.commands.latency.ranking.pairs import MeasuredPair, k_series, latency_pairs
from harness.commands.latency.tables.predicted_curve import predicted_curve
from harness.commands.names import named_runs
from harness.commands.read_runs import Run
from harness.records.command import Command
from harness.results.statistics.interval import Interval
from harness.tables.drawing import (
    AUTO,
    MEASURED,
    MOST_CURVES,
    Curves,
    DotRow,
    Point,
    curve_plot,
    dot_plot,
    svg,
    top_of,
)
from harness.tables.table import grouped

# Figures of one kind that still fit a page.
_MOST_PANELS = 12


def plots(shown: Iterable[tuple[Command, Sequence[Run]]]) -> dict[str, list[str]]:
    """SVGs by the name of their plot, of commands with their runs, where there is something to show."""
    drawn = {}
    with _own_style():
        for command, runs in shown:
            for name, figures in command.plots(runs).items():
                if figures:
                    numbered = enumerate(figures, 1)
                    drawn[name] = [svg(f"{name}-{number}", figure) for number, figure in numbered]
    return drawn


def picture_files(command: Command, run: Run) -> dict[str, str]:
    """The plots of one run as SVG files on white, by name: `map.svg`, or `map-1.svg` and so on."""
    files = {}
    with _own_style():
        for name, figures in command.plots([run]).items():
            for number, figure in enumerate(figures, 1):
                stem = name if len(figures) == 1 else f"{name}-{number}"
                figure.set_facecolor("white")
                files[f"{stem}.svg"] = svg(stem, figure)
    return files


@contextmanager
def _own_style() -> Iterator[None]:
    """Draw in the report's style, and silently."""
    # The first figure ever drawn on a machine makes matplotlib list its fonts, and log that.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has the letters that are missing in matplotlib's font.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        # A user's own matplotlibrc is for other pictures.
        matplotlib.rcdefaults()
        matplotlib.style.use(Path(__file__).with_suffix(".mplstyle"))
        yield


def latency_plots(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Speed-ups of pairs, at their best K, by K and by load."""
    pairs = latency_pairs(runs)
    speedup = "speed-up (1 = as fast as regular decoding)"
    return {
        "speedup": dot_plot(_speedups(pairs), speedup, reference=1),
        "num_draft_tokens": _against_k(pairs),
        "load": _against_load(pairs),
    }


def accuracy_plots(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Correct answers of `eval`."""
    return {"accuracy": dot_plot(_accuracies(runs), "correct answers, %, with 95 % Wald bounds")}


def _measured(pair: MeasuredPair, x: float = 0) -> Point:
    """The speed-up of a pair with its interval."""
    speedup = pair.row.speedup or Interval(0.0)
    if not speedup.has_bounds:
        return Point(speedup.estimate, x=x)
    return Point(speedup.estimate, speedup.low, speedup.high, x)


def _speedups(pairs: Sequence[MeasuredPair]) -> Iterable[DotRow]:
    """Speed-up of each pair at its best K, with its interval, and the predicted one."""
    for pair in pairs:
        if not pair.best:
            continue
        points = {MEASURED: _measured(pair)}
        if pair.row.predicted_speedup:
            points["predicted"] = Point(pair.row.predicted_speedup)
        yield DotRow(f"{points[MEASURED].value:.2f}×  {pair.name.label()}", points)


def _accuracies(runs: Sequence[Run]) -> Iterable[DotRow]:
    """Correct answers of both arms with Wald's bounds; published ones where there are any."""
    for name, run, _ in named_runs(runs):
        points = {}
        for row in merged_rows(run.rows):
            if row.accuracy is not None:
                low = max(0.0, row.wald_low or 0.0)
                high = min(1.0, row.wald_high or 1.0)
                points[str(row.arm)] = Point(100 * row.accuracy, 100 * low, 100 * high)
            if row.published_accuracy is not None:
                points["published"] = Point(100 * row.published_accuracy)
        yield DotRow(name.label(), points)


def _against_k(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Figures of the speed-up against K with the predicted curve, all to one scale."""
    panels: list[tuple[str, Curves]] = []
    for series in k_series(filter(_complete, pairs)):
        if curves := _curves_against_k(series):
            panels.append((" · ".join(series[0].name.group), curves))
    panels = panels[:_MOST_PANELS]
    top = top_of(curves for _, curves in panels)
    x_label = "K, draft tokens per iteration"
    return [curve_plot(curves, top, x_label, name).figure for name, curves in panels]


def _curves_against_k(series: Sequence[MeasuredPair]) -> Curves | None:
    """Measured points, the predicted curve, and `auto` as a line across; None with nothing to
    compare.

    Args:
        series: pairs that differ in K alone.
    """
    predicted = [Point(speedup, x=k) for k, speedup in predicted_curve(series)]
    measured = []
    autos = []
    for pair in series:
        if isinstance(pair.name.num_draft_tokens, int):
            measured.append(_measured(pair, pair.name.k_order))
        else:
            autos.append(pair)
    if not measured or not (predicted or len(series) > 1):
        return None
    # K begins at 1, and the line a little before it.
    ends = (0.7, max(point.x for point in (*measured, *predicted)))
    across = [_measured(pair, x) for pair in autos for x in ends]
    return {"predicted curve": predicted, MEASURED: measured, AUTO: across}


_complete = attrgetter("complete")


def _by_load(pairs: Sequence[MeasuredPair]) -> dict[str, dict[str, list[MeasuredPair]]]:
    """Pairs measured under several loads: unit of load -> pair's name -> measurements by load."""
    units = {}
    for unit, of_unit in grouped(pairs, attrgetter("unit_of_load")).items():
        complete = filter(_complete, of_unit)
        alike = grouped(complete, lambda pair: pair.name_without_load.label())
        several: dict[str, list[MeasuredPair]] = {}
        for name, group in alike.items():
            by_load = sorted(group, key=attrgetter("load"))
            if by_load[0].load < by_load[-1].load and len(several) < MOST_CURVES:
                several[name] = by_load
        units[unit] = several
    return units


def _against_load(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Speed-up against the load, with the line where speculation stops to pay; a figure for each unit."""
    figures = []
    for unit, groups in _by_load(pairs).items():
        curves = {
            name: [_measured(pair, pair.load) for pair in group] for name, group in groups.items()
        }
        if not curves:
            continue
        axes = curve_plot(curves, top_of([curves]), unit)
        loads = sorted({pair.load for group in groups.values() for pair in group})
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.set_xlim(loads[0] / 1.3, loads[-1] * 1.3)
        figures.append(axes.figure)
    return figures
