"""The report's plots: pairs of `latency` and runs of `eval`; `map_plots.py` draws maps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.figure import Figure

from harness.menu.command import Command
from harness.report.accuracy import merged_rows
from harness.report.costs import lengths_by_k
from harness.report.drawing import (
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
    wrapped,
)
from harness.report.names import named_runs
from harness.report.pairs import MeasuredPair, k_series, latency_pairs
from harness.report.predicted_curve import predicted_curve
from harness.report.runs import Run
from harness.report.table import grouped

# Figures of one kind that still fit a page.
_MOST_PANELS = 12
_K = "K, draft tokens per iteration"


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
    """Speed-ups, times and acceptance of pairs."""
    pairs = latency_pairs(runs)
    speedup = "speed-up (1 = as fast as regular decoding)"
    times = "ms per token ± standard deviation over prompts"
    return {
        "speedup": dot_plot(_speedups(pairs), speedup, reference=1),
        "times": dot_plot(_times(pairs), times, from_zero=True),
        "categories": _by_category(pairs),
        "num_draft_tokens": _against_k(pairs),
        "load": _against_load(pairs),
        "throughput": _throughputs(pairs),
        "positions": _by_position(pairs),
        "lengths": _lengths(pairs),
    }


def accuracy_plots(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Correct answers of `eval`, and how far the arms are apart."""
    difference = "speculative minus regular, percentage points"
    return {
        "accuracy": dot_plot(_accuracies(runs), "correct answers, %, with 95 % Wald bounds"),
        "accuracy_difference": dot_plot(_differences(runs), difference, reference=0),
    }


def _measured(pair: MeasuredPair, x: float = 0) -> Point:
    """The speed-up of a pair with its interval."""
    row = pair.row
    return Point(row.speedup or 0.0, row.speedup_low, row.speedup_high, x)


def _speedups(pairs: Sequence[MeasuredPair]) -> Iterable[DotRow]:
    """Speed-up of each pair at its best K, with its interval, and the predicted one."""
    for pair in pairs:
        if not pair.best:
            continue
        points = {MEASURED: _measured(pair)}
        if pair.row.predicted_speedup:
            points["predicted"] = Point(pair.row.predicted_speedup)
        yield DotRow(f"{pair.row.speedup:.2f}×  {pair.name.label()}", points)


def _by_category(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """A figure for each pair at its best K: speed-up in every category of prompts, with its interval."""
    figures = []
    for pair in pairs:
        rows = []
        for category in pair.categories:
            speedup = category.speedup
            label = f"{speedup.estimate:.2f}×  {category.name} ({category.num_prompts})"
            point = Point(speedup.estimate, speedup.low, speedup.high)
            rows.append(DotRow(label, {MEASURED: point}))
        figures += dot_plot(rows, f"speed-up of {wrapped(pair.name.label())}", reference=1)
    return figures[:_MOST_PANELS]


def _times(pairs: Sequence[MeasuredPair]) -> Iterable[DotRow]:
    """Milliseconds per token of both arms, with the standard deviation over prompts."""
    for pair in pairs:
        is_target_alone = pair.row.speedup is None and not pair.partial
        if not (pair.best or is_target_alone):
            continue
        points = {}
        for row in pair.run.rows:
            if ms := row.ms_per_token:
                std = row.ms_per_token_std or 0.0
                # Above 0, for a logarithmic axis.
                low = max(ms - std, ms / 50)
                points[str(row.arm)] = Point(ms, low, ms + std)
        yield DotRow(pair.name.label(), points)


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


def _differences(runs: Sequence[Run]) -> Iterable[DotRow]:
    """The difference of the arms' accuracies on the same questions, with its interval."""
    for name, run, _ in named_runs(runs):
        for row in merged_rows(run.rows):
            if row.difference is None:
                continue
            ends = (row.difference_low, row.difference_high)
            low, high = (None if end is None else 100 * end for end in ends)
            label = f"{100 * row.difference:+.1f}  {name.label()}"
            yield DotRow(label, {MEASURED: Point(100 * row.difference, low, high)})


def _against_k(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Figures of the speed-up against K with the predicted curve, all to one scale."""
    panels: list[tuple[str, Curves]] = []
    for series in k_series(filter(_complete, pairs)):
        if curves := _curves_against_k(series):
            panels.append((" · ".join(series[0].name.group), curves))
    panels = panels[:_MOST_PANELS]
    top = top_of(curves for _, curves in panels)
    figures = []
    for name, curves in panels:
        axes = curve_plot(curves, top, _K, "speed-up", wrapped(name), reference=1)
        figures.append(axes.figure)
    return figures


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
        axes = curve_plot(curves, top_of([curves]), unit, "speed-up", reference=1)
        loads = sorted({pair.load for group in groups.values() for pair in group})
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.set_xlim(loads[0] / 1.3, loads[-1] * 1.3)
        figures.append(axes.figure)
    return figures


def _throughputs(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Tokens per second in all against tokens per second of one reader; each point has its load."""
    figures = []
    for groups in _by_load(pairs).values():
        for name, group in groups.items():
            if axes := _throughput(group, wrapped(name)):
                figures.append(axes.figure)
    return figures


def _throughput(group: Sequence[MeasuredPair], title: str) -> Any:
    """The axes of one figure; None without times.

    Args:
        group: one pair under several loads.
    """
    curves: dict[str, list[Point]] = {}
    labels = []
    for pair in group:
        rate = "/s" if pair.row.request_rate else ""
        for row in pair.run.rows:
            if row.tokens_per_second and row.ms_per_token:
                point = Point(
                    value=row.tokens_per_second,
                    low=row.tokens_per_second_low,
                    high=row.tokens_per_second_high,
                    x=1000 / row.ms_per_token,
                    x_low=row.tokens_per_second_per_user_low,
                    x_high=row.tokens_per_second_per_user_high,
                )
                curves.setdefault(str(row.arm), []).append(point)
                labels.append((point, f"{pair.load:g}{rate}"))
    if not curves:
        return None
    axes = curve_plot(curves, top_of([curves]), "tokens/s per user", "tokens/s in all", title)
    for point, load in labels:
        place = point.x, point.value
        axes.annotate(load, place, textcoords="offset points", xytext=(5, 4))
    axes.set_xlim(0, 1.12 * max(point.x_high or point.x for point, _ in labels))
    return axes


def _by_position(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Share of draft tokens accepted at each position, of those that were tested there."""
    curves: dict[str, list[Point]] = {}
    for pair in pairs:
        # No token of a block is tested by itself.
        tested = None if pair.row.rule == "block" else pair.row.acceptance_by_position
        if pair.best and tested and len(curves) < MOST_CURVES:
            curves[pair.name.label()] = [
                Point(100 * rate, x=position)
                for position, rate in enumerate(tested, 1)
                if rate is not None
            ]
    if not curves:
        return []
    # Above 100 only in a damaged file.
    top = max([100.0, *(point.value for points in curves.values() for point in points)])
    axes = curve_plot(curves, top, "position of the draft token", "accepted of those tested, %")
    return [axes.figure]


def _lengths(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Tokens per iteration, had at most 1, 2, ... tokens been proposed, with intervals."""
    curves: dict[str, list[Point]] = {}
    for pair in pairs:
        lengths = lengths_by_k(pair.row)
        if pair.best and len(lengths) > 1 and len(curves) < MOST_CURVES:
            curves[pair.name.label()] = [
                Point(of_k.value, of_k.low, of_k.high, of_k.num_draft_tokens) for of_k in lengths
            ]
    if not curves:
        return []
    return [curve_plot(curves, top_of([curves]), _K, "tokens per iteration").figure]
