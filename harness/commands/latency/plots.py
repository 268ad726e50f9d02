"""The plots of `latency`: the speed-up by K and by load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from harness.commands.latency.ranking.pairs import latency_pairs
from harness.commands.latency.tables.predicted_curve import predicted_curve
from harness.reporting.drawing import (
    AUTO,
    MEASURED,
    MOST_CURVES,
    MOST_PLOTS,
    PREDICTED,
    Curves,
    Plot,
    Point,
    curve_plots,
)
from harness.results.runs import Run


def latency_plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """Speed-ups of pairs by K, and by load with the line where speculation stops to pay."""
    pairs = latency_pairs(runs)
    if pairs.empty:
        return {}
    complete = pairs[pairs.speedup.notna()]
    by_k: list[tuple[str, Curves]] = []
    for _, series in complete.groupby("series", sort=False):
        if len(by_k) < MOST_PLOTS and (curves := _curves_against_k(series)):
            by_k.append((" · ".join(series["name"].iloc[0].group), curves))
    by_load: list[Plot] = []
    # A damaged file may hold any number.
    for unit, of_unit in complete[complete.load > 0].groupby("unit_of_load", sort=False):
        several = of_unit[of_unit.groupby("curve").load.transform("nunique") > 1]
        curves = {}
        for _, curve in [*several.groupby("curve", sort=False)][:MOST_CURVES]:
            # Of several K, or circumstances, at one load the best.
            at_load = curve.loc[curve.groupby("load").speedup.idxmax()]
            name = at_load["name"].iloc[0]
            details = [text for column, text in name.settings.items() if column != "batch_size"]
            curves[" · ".join([name.pair, *details])] = _points(at_load.itertuples(), "load")
        if curves:
            by_load += curve_plots([("", curves)], str(unit), doubling=True)
    return {"num_draft_tokens": curve_plots(by_k, "K, draft tokens per iteration"), "load": by_load}


def _points(pairs: Iterable[Any], x: str) -> list[Point]:
    speedups = [(pair.verdict.speedup, getattr(pair, x)) for pair in pairs]
    return [Point(speedup.estimate, speedup.low, speedup.high, x) for speedup, x in speedups]


def _curves_against_k(series: pd.DataFrame) -> Curves | None:
    """Measured points, the predicted curve, and `auto` as a line across; None with nothing to
    compare.

    Args:
        series: pairs that differ in K alone.
    """
    nan = float("nan")
    predicted = [Point(speedup, nan, nan, k) for k, speedup in predicted_curve(series)]
    is_number = series.k_order.map(math.isfinite) & (series.k_order > 0)
    measured = _points(series[is_number].itertuples(), "k")
    if not measured or not (predicted or len(series) > 1):
        return None
    # K begins at 1, and the line a little before it.
    ends = (0.7, max(point.x for point in (*measured, *predicted)))
    autos = _points(series[~is_number].itertuples(), "k_order")
    across = [auto._replace(x=x) for auto in autos for x in ends]
    return {PREDICTED: predicted, MEASURED: measured, AUTO: across}
