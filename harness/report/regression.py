"""Runs before a change and after it, paired by settings and prompts, and what became of each figure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.menu.records import COMMANDS
from harness.report.runs import Run
from harness.report.table import grouped
from harness.results.files import read_answers
from harness.results.schema import LatencyPromptRow, RunRow
from harness.results.statistics.comparisons import (
    Comparison,
    Direction,
    Noise,
    Verdict,
    compare,
    compare_proportions,
    noise_of_runs,
)
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL
from harness.results.statistics.multiplicity import adjusted_p_values
from harness.results.statistics.power import visible_difference

# The chance to be wrong that an adjusted p-value has to stay below.
_LEVEL = 0.05
# Settings in which repetitions may differ, and addresses, which say nothing about a measurement.
_OF_A_REPETITION = ("seed", "repeat", "repeats", "url", "regular_url")

# The prompts of a unit: one, or those of a batch or lap.
Unit = tuple[int, ...]
Values = Mapping[Unit, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A figure that is compared.

    Args:
        better: the direction that is good.
        words: what it is called when the figure is better, and when it is worse.
        timed: whether it differs between identical runs.
        unchanged: the change of a figure that stays as it is: 1 for a ratio, 0 for a difference.
    """

    name: str
    better: Direction
    words: tuple[str, str]
    timed: bool = False
    unchanged: float = 1.0


@dataclass(frozen=True)
class FigureOfPrompts(Figure):
    """A figure that every prompt has.

    Args:
        of: its value for each unit of a run; empty where the run does not have it.
    """

    of: Callable[[Sequence[LatencyPromptRow]], Values] = field(kw_only=True)


class Sides(NamedTuple):
    """Two measurements with the same settings.

    Attributes:
        before, after: the runs of each, repetitions of one another.
        margin: a change for the worse up to this share is tolerated.
        noise: how far apart identical runs are, by the name of the figure.
    """

    before: Sequence[Run]
    after: Sequence[Run]
    margin: float
    noise: Mapping[str, Noise]

    def compared(self, figure: Figure) -> Compared:
        """The comparison of a figure, before it is made."""
        return Compared(self.before[-1].last, self.after[-1].last, figure)


@dataclass(frozen=True)
class Compared:
    """One figure of one pair of measurements.

    Args:
        before, after: a row of each.
        means: of the figure, before and after; None where there is nothing to compare.
        reason: why there is no verdict, where the interval does not show it.
    """

    before: RunRow
    after: RunRow
    figure: Figure
    verdict: Verdict = "cannot tell"
    comparison: Comparison | None = None
    means: tuple[float, float] | None = None
    reason: str = ""

    @property
    def change(self) -> str | None:
        """`+2.0%` or `+2.0 points`; None where nothing was compared."""
        if self.comparison is None:
            return None
        return self._in_words(self.comparison.change.estimate)

    @property
    def interval(self) -> str | None:
        """The 95 % interval of the change."""
        if self.comparison is None:
            return None
        change = self.comparison.change
        if math.isnan(change.low):
            return None
        return f"{self._in_words(change.low)} to {self._in_words(change.high)}"

    @property
    def in_words(self) -> str:
        """`faster`, `slower`, `no worse`, `cannot tell`."""
        better, worse = self.figure.words
        return {"better": better, "worse": worse}.get(self.verdict, self.verdict)

    @property
    def visible(self) -> float | None:
        """The smallest change that such a comparison finds in 80 % of the cases."""
        if self.comparison is None:
            return None
        estimate = self.comparison.estimate
        if estimate is None or not estimate.has_interval:
            return None
        return visible_difference(estimate)

    def _in_words(self, change: float) -> str:
        """`+2.0%` of a ratio; `+2.0 points` of a difference of percentages."""
        if self.figure.unchanged == 0:
            return f"{100 * change:+.1f} points"
        return f"{change - self.figure.unchanged:+.1%}"


def settings_key(run: Run) -> str:
    """The settings by which runs are paired, as text."""
    return json.dumps(settings_of(run.last), sort_keys=True, default=str)


def settings_of(row: RunRow) -> dict[str, object]:
    """The settings of a row, and which prompts it had."""
    columns = row.columns()
    names = [name for name, about in columns.items() if about["kind"] == "setting"]
    kept = [name for name in names if name not in _OF_A_REPETITION]
    return {name: getattr(row, name) for name in [*kept, "prompts_digest"] if name in columns}


def compared_runs(
    before: Sequence[Run], after: Sequence[Run], margin: float, noise: Sequence[Run] = ()
) -> list[Compared]:
    """Compare the measurements that both sides have, figure by figure.

    Where several pairs are compared, significance is adjusted for their number (Benjamini and
    Hochberg), for each figure.

    Args:
        before, after: complete runs; those with the same settings are repetitions.
        margin: a change for the worse up to this share is tolerated.
        noise: runs of one program, whose differences are noise.
    """
    by_settings = grouped(after, settings_key)
    noises = noise_by_figure(noise)
    compared: list[Compared] = []
    for key, first in grouped(before, settings_key).items():
        second = by_settings.get(key)
        if second:
            sides = Sides(first, second, margin, noises)
            compared += COMMANDS[first[0].command].changes(sides)
    adjusted: list[Compared] = []
    for of_figure in grouped(compared, lambda one: one.figure.name).values():
        adjusted += _adjusted(of_figure)
    order = {one.before.run: number for number, one in enumerate(compared)}
    return sorted(adjusted, key=lambda one: order[one.before.run])


def noise_by_figure(runs: Sequence[Run]) -> dict[str, Noise]:
    """How far apart identical runs are, for each figure that is timed."""
    measured = {}
    for figure in _OF_PROMPTS:
        if not figure.timed:
            continue
        matrices = []
        for alike in grouped(runs, settings_key).values():
            values = _by_run(alike, figure)
            units = _common_units(values)
            if len(values) > 1 and units:
                matrices.append(_matrix(values, units))
        if matrices:
            measured[figure.name] = noise_of_runs(matrices)
    return measured


def changes_by_prompt(sides: Sides) -> list[Compared]:
    """The figures of `latency` that both sides have."""
    compared = [_compared_figure(figure, sides) for figure in _OF_PROMPTS]
    known = [pair for pair in compared if pair is not None]
    if known:
        return known
    reason = "the files of the prompts are gone (column directory)"
    return [replace(sides.compared(_OF_PROMPTS[0]), reason=reason)]


def change_of_accuracy(sides: Sides) -> Compared:
    """The accuracy of `eval` over the questions that both sides were asked."""
    pair = sides.compared(_ACCURACY)
    first = _correct(sides.before)
    second = _correct(sides.after)
    questions = sorted(set(first) & set(second))
    if not questions:
        return replace(pair, reason="no question was answered on both sides")
    before = [first[question] for question in questions]
    after = [second[question] for question in questions]
    comparison = compare_proportions(before, after, sides.margin)
    means = fmean(before), fmean(after)
    return replace(pair, comparison=comparison, means=means, verdict=comparison.verdict)


def _compared_figure(figure: FigureOfPrompts, sides: Sides) -> Compared | None:
    """One figure of one pair; None where a side does not have it."""
    before = _by_run(sides.before, figure)
    after = _by_run(sides.after, figure)
    if not before or not after:
        return None
    same_draws = _by_common_seed(sides, figure)
    if same_draws:
        before, after = same_draws
    pair = sides.compared(figure)
    units = _common_units([*before, *after])
    if not units:
        return replace(pair, reason="no prompt was answered on both sides")
    first = _matrix(before, units)
    second = _matrix(after, units)
    means = float(first.mean()), float(second.mean())
    if same_draws:
        # Runs differ by their seeds, and so do those of the other side: that is no noise.
        first, second = (_mean_over_runs(side) for side in (first, second))
    noise = sides.noise.get(figure.name)
    unit = "prompt" if all(len(unit) == 1 for unit in units) else "lap"
    comparison = compare(first, second, figure.better, sides.margin, noise, unit=unit)
    pair = replace(pair, comparison=comparison, means=means, verdict=comparison.verdict)
    reason = ""
    if len(units) < FEWEST_FOR_INTERVAL:
        reason = f"{len(units)} prompts or laps are on both sides, and {FEWEST_FOR_INTERVAL} needed"
    elif figure.timed and noise is None and len(first) == len(second) == 1:
        reason = "one run on each side, which says nothing about noise: repeats=5, or noise="
    return replace(pair, verdict="cannot tell", reason=reason) if reason else pair


def _adjusted(of_figure: Sequence[Compared]) -> list[Compared]:
    """Without the differences that are not significant once all pairs are counted."""
    p_values = [pair.comparison.p_value if pair.comparison else float("nan") for pair in of_figure]
    adjusted = []
    for pair, p_value in zip(of_figure, adjusted_p_values(p_values), strict=True):
        if len(of_figure) > 1 and pair.verdict in ("better", "worse") and p_value >= _LEVEL:
            reason = f"not significant among {len(of_figure)} comparisons"
            pair = replace(pair, verdict="cannot tell", reason=reason)
        adjusted.append(pair)
    return adjusted


def _by_run(runs: Iterable[Run], figure: FigureOfPrompts) -> list[Values]:
    values = [figure.of(run.prompts) for run in runs]
    return [of_run for of_run in values if of_run]


def _by_common_seed(
    sides: Sides, figure: FigureOfPrompts
) -> tuple[list[Values], list[Values]] | None:
    """The figure in a run of each seed that both sides have, in the same order; None of a timed one, or without any."""
    if figure.timed:
        return None
    before, after = (
        {run.last.seed: figure.of(run.prompts) for run in side}
        for side in (sides.before, sides.after)
    )
    seeds = [seed for seed in before if before[seed] and after.get(seed)]
    return ([before[seed] for seed in seeds], [after[seed] for seed in seeds]) if seeds else None


def _mean_over_runs(values: Floats) -> Floats:
    """Geometric means, [1, num_units], of [num_runs, num_units]."""
    return np.asarray(np.exp(np.log(values).mean(axis=0, keepdims=True)))


def _common_units(runs: Sequence[Values]) -> list[Unit]:
    return sorted(set.intersection(*(set(values) for values in runs))) if runs else []


def _matrix(runs: Sequence[Values], units: Sequence[Unit]) -> Floats:
    return np.array([[values[unit] for unit in units] for values in runs])


def _correct(runs: Sequence[Run]) -> dict[tuple[int, int], bool]:
    """Whether the arm of the draft, or the only one, answered each question correctly."""
    correct = {}
    for run in runs:
        for answer in read_answers((run.directory or Path()) / "eval_prompts.csv"):
            if answer.arm == run.last.arm:
                correct[answer.seed, answer.prompt_index] = answer.correct
    return correct


def _units(prompts: Sequence[LatencyPromptRow], arm: str) -> dict[Unit, list[LatencyPromptRow]]:
    """The rows of an arm by unit; units with a failed request are left out."""
    rows = [row for row in prompts if row.arm == arm and row.prompt_index is not None]
    members = grouped(rows, lambda row: row.prompt_index if row.unit is None else row.unit)
    units = {}
    for of_unit in members.values():
        if all(row.is_timed for row in of_unit):
            places = sorted(row.prompt_index or 0 for row in of_unit)
            units[tuple(places)] = of_unit
    return units


def ms_per_token(prompts: Sequence[LatencyPromptRow], arm: str = "") -> Values:
    """Milliseconds per token of an arm, by the prompts of a unit.

    Args:
        arm: by default the one that speculates, or the only one.
    """
    arm = arm or ("speculative" if any(row.arm == "speculative" for row in prompts) else "regular")
    return {
        unit: fmean(row.ms_per_token for row in rows) for unit, rows in _units(prompts, arm).items()
    }


def ms_of_both_arms(prompts: Sequence[LatencyPromptRow]) -> dict[Unit, tuple[float, float]]:
    """The same of the regular and of the speculative arm, where both are known."""
    regular = ms_per_token(prompts, "regular")
    speculative = ms_per_token(prompts, "speculative")
    return {unit: (regular[unit], ms) for unit, ms in speculative.items() if unit in regular}


def _speedup(prompts: Sequence[LatencyPromptRow]) -> Values:
    return {unit: regular / ms for unit, (regular, ms) in ms_of_both_arms(prompts).items()}


def _tokens_per_iteration(prompts: Sequence[LatencyPromptRow]) -> Values:
    found = {}
    for unit, rows in _units(prompts, "speculative").items():
        # Older files have the mean over iterations that proposed something.
        lengths = [row.tokens_per_iteration or row.mean_acceptance_length or 0.0 for row in rows]
        if all(lengths):
            found[unit] = fmean(lengths)
    return found


_OF_PROMPTS = (
    FigureOfPrompts(
        name="ms per token", better="lower", words=("faster", "slower"), timed=True, of=ms_per_token
    ),
    FigureOfPrompts(
        name="speed-up", better="higher", words=("higher", "lower"), timed=True, of=_speedup
    ),
    FigureOfPrompts("tokens per iteration", "higher", ("more", "fewer"), of=_tokens_per_iteration),
)
_ACCURACY = Figure("accuracy", "higher", ("higher", "lower"), unchanged=0.0)
