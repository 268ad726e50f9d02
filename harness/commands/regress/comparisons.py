"""Runs before a change and after it, paired by settings and prompts, and how each figure changed.

Runs with the same settings are repetitions of one measurement; `Sides` has those before the change
and those after it. Each figure of it is compared over the units that all these runs have
(`Compared`): prompts, or batches or laps of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.commands.eval.rows import read_answers
from harness.commands.latency.tables.costs import tokens_per_iteration
from harness.commands.registry import COMMANDS
from harness.reporting.names import STARTS_SERVERS, Name, distinct_names, name_of
from harness.results.prompt_times import Unit, ms_by_unit, ms_of_both_arms, rows_by_unit
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT, RunRow
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
from harness.results.verdict import ArmEvidence, why_other_work

# The chance to be wrong that an adjusted p-value has to stay below.
_LEVEL = 0.05
# Settings in which repetitions of a measurement may differ, addresses of servers included.
_OF_A_REPETITION = ("seed", "repeat", "repeats", "url", "regular_url")
# Settings that follow from another one, which names them where both differ.
_FOLLOWING = {
    "model": ("repository",),
    "draft": tuple(
        "draft_repository draft_quantization draft_method draft_sampling draft_tree draft_budget draft_layers"
        " max_ngram shared num_draft_tokens rule lenience lossy".split()
    ),
    "prompts": ("prompts_digest",),
    "rule": ("lossy",),
    "lenience": ("lossy",),
}
# Settings of each side that are searched for the nearest pair.
_MOST_SEARCHED = 100
_ONE_RUN = "one run on each side, which says nothing about noise: repeats=5, or noise="

# If the mean numbers of draft tokens per iteration differ by more than this, in logarithms (10 %), a
# server drafted with another K.
_OTHER_K = 0.1

Values = Mapping[Unit, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A figure that is compared.

    Attributes:
        better: the direction that is good: `lower` or `higher`.
        words: the verdict if it is better, and if it is worse: `faster` and `slower`.
        timed: whether it is a time, which differs between identical runs.
        is_share: whether it is a share of answers, whose change is a difference in points; of others
            it is a ratio.
    """

    name: str
    better: Direction
    words: tuple[str, str]
    timed: bool = False
    is_share: bool = False


@dataclass(frozen=True)
class FigureOfPrompts(Figure):
    """A figure that every prompt has.

    Attributes:
        column: of the runs' own rows.
        by_unit: rows of a run's prompts file -> its value for each unit; empty where they lack it.
    """

    column: str = field(kw_only=True)
    by_unit: Callable[[Sequence[LatencyPromptRow]], Values] = field(kw_only=True)


@dataclass(frozen=True)
class Sides:
    """Two measurements with the same settings.

    Attributes:
        before, after: the runs of each, repetitions of one another.
        margin: a change for the worse up to this share is tolerated.
        noise: how far apart runs with the same settings on the same devices are, by the name of the
            figure.
    """

    before: Sequence[Run]
    after: Sequence[Run]
    margin: float
    noise: Mapping[str, Noise]

    @property
    def runs(self) -> Sequence[Run]:
        return [*self.before, *self.after]

    def compared(self, figure: Figure) -> Compared:
        """The comparison of a figure, without a result yet."""
        after = self.after[-1].last
        return Compared(self.before[-1].last, after, figure, name_of(after))


@dataclass(frozen=True)
class Compared:
    """One figure of a measurement before and after the change.

    Attributes:
        before, after: a row of each, for its settings and circumstances.
        mean_before, mean_after: of the figure over units and runs; None where nothing was compared.
        name: of the measurement among the others.
        noise: of identical runs, where that was given.
        reason: why there is no verdict, where the interval does not show it.
    """

    before: RunRow
    after: RunRow
    figure: Figure
    name: Name
    verdict: Verdict = "cannot tell"
    comparison: Comparison | None = None
    mean_before: float | None = None
    mean_after: float | None = None
    noise: Noise | None = None
    reason: str = ""

    @property
    def change(self) -> str | None:
        """`+2.0%` or `+2.0 points`; None where nothing was compared."""
        return None if self.comparison is None else self._signed(self.comparison.change.estimate)

    @property
    def interval(self) -> str | None:
        """The 95 % interval of the change."""
        if self.comparison is None or not self.comparison.change.has_bounds:
            return None
        change = self.comparison.change
        return f"{self._signed(change.low)} to {self._signed(change.high)}"

    @property
    def in_words(self) -> str:
        """The verdict: `faster`, `slower`, `no worse`, `cannot tell`."""
        better, worse = self.figure.words
        return {"better": better, "worse": worse}.get(self.verdict, self.verdict)

    @property
    def needs_runs(self) -> bool:
        """Whether more runs could give a verdict."""
        return self.comparison is not None and self.reason in ("", _ONE_RUN)

    @property
    def visible(self) -> float | None:
        """The smallest change that such a comparison finds in 80 % of the cases."""
        estimate = None if self.comparison is None else self.comparison.estimate
        return None if estimate is None else estimate.visible_difference

    def _signed(self, change: float) -> str:
        """A change in words: a ratio of 1.02 is `+2.0%`, a difference of 0.02 `+2.0 points`."""
        return f"{100 * change:+.1f} points" if self.figure.is_share else f"{change - 1:+.1%}"


def settings_key(run: Run) -> str:
    """The settings by which runs are paired, as text."""
    return json.dumps(settings_of(run.last), sort_keys=True, default=str)


def settings_of(row: RunRow) -> dict[str, Any]:
    """The settings of a row by which it is compared, and which prompts it had."""
    columns = row.columns()
    names = [name for name, column in columns.items() if column.kind == "setting"]
    kept = [name for name in names if name not in _OF_A_REPETITION]
    settings = {name: getattr(row, name) for name in [*kept, "prompts_digest"] if name in columns}
    # Older rows have "none" for drafts without weights too, newer ones leave it empty.
    if settings.get("draft_quantization") == "none":
        settings["draft_quantization"] = None
    without_column = settings.pop("settings", None) or {}
    for name, value in without_column.items():
        # Another build, or other flags, are what is compared. `server_command` shows it.
        if name not in STARTS_SERVERS:
            settings[name] = value
    return settings


def nearest_difference(before: Sequence[Run], after: Sequence[Run]) -> dict[str, tuple[Any, Any]]:
    """The settings in which the two most similar runs differ, with both values; without those that follow from
    others. Empty if no command is on both sides.
    """
    sides = []
    for runs in (before, after):
        of_key = {settings_key(run): (run.command, settings_of(run.last)) for run in runs}
        newest_first = [*reversed(of_key.values())]
        sides.append(newest_first[:_MOST_SEARCHED])
    nearest: dict[str, tuple[Any, Any]] = {}
    for command_after, settings_after in sides[1]:
        for command_before, settings_before in sides[0]:
            if command_before == command_after:
                differing = _differing(settings_before, settings_after)
                if not nearest or len(differing) < len(nearest):
                    nearest = differing
    return nearest


def _differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    differing = {}
    for name in before | after:
        if before.get(name) != after.get(name):
            differing[name] = (before.get(name), after.get(name))
    following = {name for leading in differing for name in _FOLLOWING.get(leading, ())}
    return {name: values for name, values in differing.items() if name not in following}


def compared_runs(
    before: Sequence[Run], after: Sequence[Run], margin: float, noise: Sequence[Run] = ()
) -> list[Compared]:
    """Compare the measurements that both sides have, figure by figure.

    Where a figure of several measurements is compared, its significance is adjusted for their
    number (Benjamini and Hochberg).

    Args:
        before, after: complete runs; those with the same settings are repetitions.
        margin: a change for the worse up to this share is tolerated.
        noise: runs of one program, whose differences are noise.
    """
    by_settings = grouped(after, settings_key)
    compared: list[Compared] = []
    for key, runs_before in grouped(before, settings_key).items():
        runs_after = by_settings.get(key)
        if runs_after:
            devices = {run.last.devices for run in (*runs_before, *runs_after)}
            alike = [run for run in noise if settings_key(run) == key]
            here = [run for run in alike if {run.last.devices} == devices]
            sides = Sides(runs_before, runs_after, margin, noise_by_figure(here))
            compared += COMMANDS[runs_before[0].command].changes(sides)
    adjusted: list[Compared] = []
    for of_figure in grouped(compared, attrgetter("figure.name")).values():
        adjusted += _adjusted(of_figure)
    # Back from the order of figures to that of measurements.
    places = {one.before.run: place for place, one in enumerate(compared)}
    ordered = sorted(adjusted, key=lambda one: places[one.before.run])
    names = distinct_names([one.after for one in ordered])
    return [replace(one, name=name) for one, name in zip(ordered, names, strict=True)]


def noise_by_figure(runs: Sequence[Run]) -> dict[str, Noise]:
    """How far apart identical runs are, for each figure that is timed."""
    noises = {}
    for figure in filter(attrgetter("timed"), _OF_PROMPTS):
        matrices = []
        for alike in grouped(runs, settings_key).values():
            values = _by_run(alike, figure)
            units = _common_units(values)
            if len(values) > 1 and units:
                matrices.append(_matrix(values, units))
        if matrices:
            noises[figure.name] = noise_of_runs(matrices)
    return noises


def changes_by_prompt(sides: Sides) -> list[Compared]:
    """The figures of `latency` that both sides have; without a verdict where they cannot be compared."""
    both = (("before", sides.before), ("after", sides.after))
    refused = [(side, run) for side, runs in both for run in runs if run.status == NO_VERDICT]
    if refused:
        side, run = refused[0]
        reason: str | None = f"{side}: no verdict: {run.last.error}"
    else:
        reason = why_other_work(_evidence(sides.before[-1]), _evidence(sides.after[-1]))
    compared = [_compared_figure(figure, sides) for figure in _OF_PROMPTS]
    known = [one for one in compared if one is not None]
    if reason is not None and known:
        # Without the figures: they are of different work.
        return [replace(sides.compared(one.figure), reason=reason) for one in known]
    if known:
        return known
    if reason is None:
        unread = [run for run in sides.runs if not run.prompt_rows]
        reason = "the times in the prompts' files cannot be read"
        if unread:
            reason = "files of the prompts are gone (column directory)"
        places = {str(run.directory or run.file) for run in unread or sides.runs}
        reason += f": {', '.join(sorted(places))}"
    return [replace(sides.compared(_OF_PROMPTS[0]), reason=reason)]


def _evidence(run: Run) -> ArmEvidence:
    row = run.last
    of_arm = [prompt for prompt in run.prompt_rows if prompt.arm == row.arm and prompt.is_timed]
    return ArmEvidence.of(
        vars(row),
        lengths={prompt.prompt_index: prompt.num_tokens for prompt in of_arm},
        drawn=row.ignore_eos is False and bool(row.temperature),
    )


def change_of_accuracy(sides: Sides) -> Compared:
    """The accuracy of `eval` over the questions that both sides were asked."""
    compared = sides.compared(_ACCURACY)
    correct_before = _correct(sides.before)
    correct_after = _correct(sides.after)
    questions = [question for question in correct_before if question in correct_after]
    if not questions:
        return replace(compared, reason="no question was answered on both sides")
    before = [correct_before[question] for question in questions]
    after = [correct_after[question] for question in questions]
    comparison = compare_proportions(before, after, sides.margin)
    return replace(
        compared,
        comparison=comparison,
        mean_before=fmean(before),
        mean_after=fmean(after),
        verdict=comparison.verdict,
    )


def _compared_figure(figure: FigureOfPrompts, sides: Sides) -> Compared | None:
    """One figure of a measurement; None where a side does not have it."""
    runs_before = _by_run(sides.before, figure)
    runs_after = _by_run(sides.after, figure)
    if not runs_before or not runs_after:
        return None
    with_same_seeds = None if figure.timed else _by_common_seed(sides, figure)
    if with_same_seeds is not None:
        runs_before, runs_after = with_same_seeds
    compared = sides.compared(figure)
    units = _common_units([*runs_before, *runs_after])
    if not units:
        return replace(compared, reason="no prompt has a time on both sides")
    before = _matrix(runs_before, units)
    after = _matrix(runs_after, units)
    if with_same_seeds is not None:
        # Runs of one side differ because of their seeds, which the other side has too: that is no noise.
        before = _mean_over_runs(before)
        after = _mean_over_runs(after)
    noise = sides.noise.get(figure.name)
    unit = "prompt" if all(len(unit) == 1 for unit in units) else "lap"
    comparison = compare(before, after, figure.better, sides.margin, noise, unit=unit)
    verdict = comparison.verdict
    reason = ""
    if figure is _TOKENS_PER_ITERATION:
        reason = _other_k(sides)
    if len(units) < FEWEST_FOR_INTERVAL:
        reason = f"{len(units)} prompts or laps are on both sides, and {FEWEST_FOR_INTERVAL} needed"
    elif figure.timed and noise is None and len(before) == len(after) == 1:
        reason = _ONE_RUN
    if reason:
        verdict = "cannot tell"
    return replace(
        compared,
        comparison=comparison,
        mean_before=_own_figure(figure, sides.before),
        mean_after=_own_figure(figure, sides.after),
        noise=noise,
        verdict=verdict,
        reason=reason,
    )


def _own_figure(figure: FigureOfPrompts, runs: Sequence[Run]) -> float | None:
    """The mean over runs of the figure that their own pages show; None where none shows it."""
    values = [run.last.values()[figure.column] for run in runs]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _other_k(sides: Sides) -> str:
    """Why tokens per iteration are no better or worse: a server proposed more or fewer, which its settings do not
    show. Empty where both sides proposed alike.
    """
    before, after = (
        [run.last.mean_proposed for run in runs if run.last.url and run.last.mean_proposed]
        for runs in (sides.before, sides.after)
    )
    if not before or not after or abs(math.log(fmean(after) / fmean(before))) < _OTHER_K:
        return ""
    return f"{fmean(before):.3g} draft tokens per iteration before, {fmean(after):.3g} after"


def _adjusted(of_figure: Sequence[Compared]) -> list[Compared]:
    """The comparisons of one figure, where significance allows for their number."""
    p_values = [one.comparison.p_value if one.comparison else float("nan") for one in of_figure]
    adjusted = []
    for one, p_value in zip(of_figure, adjusted_p_values(p_values), strict=True):
        if len(of_figure) > 1 and one.verdict in ("better", "worse") and p_value >= _LEVEL:
            reason = f"not significant among {len(of_figure)} comparisons"
            one = replace(one, verdict="cannot tell", reason=reason)
        adjusted.append(one)
    return adjusted


def _by_run(runs: Iterable[Run], figure: FigureOfPrompts) -> list[Values]:
    """The figure in each run that has it."""
    values = [figure.by_unit(run.prompt_rows) for run in runs]
    return [of_run for of_run in values if of_run]


def _by_common_seed(
    sides: Sides, figure: FigureOfPrompts
) -> tuple[list[Values], list[Values]] | None:
    """The figure in runs with the same seeds before and after, in the same order; else None."""
    before = {run.last.seed: figure.by_unit(run.prompt_rows) for run in sides.before}
    after = {run.last.seed: figure.by_unit(run.prompt_rows) for run in sides.after}
    seeds = [seed for seed in before if before[seed] and after.get(seed)]
    if not seeds:
        return None
    return [before[seed] for seed in seeds], [after[seed] for seed in seeds]


def _mean_over_runs(values: Floats) -> Floats:
    """Geometric means, [1, num_units], of [num_runs, num_units]."""
    return np.asarray(np.exp(np.log(values).mean(axis=0, keepdims=True)))


def _common_units(runs: Sequence[Values]) -> list[Unit]:
    """The units that all runs have."""
    return sorted(set.intersection(*(set(values) for values in runs))) if runs else []


def _matrix(runs: Sequence[Values], units: Sequence[Unit]) -> Floats:
    """The values of a figure, [num_runs, num_units]."""
    return np.array([[values[unit] for unit in units] for values in runs])


def _correct(runs: Sequence[Run]) -> dict[Hashable, bool]:
    """Whether the draft's arm, or the only one, was correct, by (seed, index) of the question.

    Greedy answers to the same question are copies: by the question itself.
    """
    correct: dict[Hashable, bool] = {}
    for run in runs:
        if run.directory is None:
            continue
        is_greedy = run.last.temperature == 0
        for answer in read_answers(run.directory / "eval_prompts.csv"):
            if answer.arm == run.last.arm:
                drawn = (answer.seed, answer.prompt_index)
                question = (answer.a, answer.b, answer.source_row)
                correct[question if is_greedy else drawn] = answer.correct
    return correct


def _ms_per_token(prompts: Sequence[LatencyPromptRow]) -> Values:
    """Milliseconds per token of the arm that speculates, or of the only one."""
    has_draft = any(row.arm == "speculative" for row in prompts)
    times = ms_by_unit(prompts, "speculative" if has_draft else "regular")
    return {unit: fmean(of_unit) for unit, of_unit in times.items()}


def _speedup(prompts: Sequence[LatencyPromptRow]) -> Values:
    return {unit: regular / ms for unit, (regular, ms) in ms_of_both_arms(prompts).items()}


def _tokens_per_iteration(prompts: Sequence[LatencyPromptRow]) -> Values:
    by_unit = {}
    for unit, rows in rows_by_unit(prompts, "speculative").items():
        lengths = [tokens_per_iteration(row) for row in rows]
        known = [length for length in lengths if length]
        if len(known) == len(lengths):
            by_unit[unit] = fmean(known)
    return by_unit


_TOKENS_PER_ITERATION = FigureOfPrompts(
    name="tokens per iteration",
    better="higher",
    words=("more", "fewer"),
    column="tokens_per_iteration",
    by_unit=_tokens_per_iteration,
)
_OF_PROMPTS = (
    FigureOfPrompts(
        name="ms per token",
        better="lower",
        words=("faster", "slower"),
        timed=True,
        column="ms_per_token",
        by_unit=_ms_per_token,
    ),
    FigureOfPrompts(
        name="speed-up",
        better="higher",
        words=("higher", "lower"),
        timed=True,
        column="speedup",
        by_unit=_speedup,
    ),
    _TOKENS_PER_ITERATION,
)
_ACCURACY = Figure("accuracy", "higher", ("higher", "lower"), is_share=True)
