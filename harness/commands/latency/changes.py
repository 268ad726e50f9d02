"""How the times and the acceptance of a measurement changed, prompt by prompt, for `regress`.

Figures are compared over the units that all runs of both sides have: prompts, or batches or laps of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from harness.config.amounts import counted, percent
from harness.measuring.prices import spent_by_unit
from harness.measuring.rows import LatencyRow
from harness.reporting.changes import ONE_RUN, Compared, Figure, Sides
from harness.results.prompt_times import Unit, rows_by_unit, waits_by_unit, waits_of_both_arms
from harness.results.rows.prompts import decoded_and_iterations
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.comparisons import Noise, compare, noise_of_runs
from harness.results.statistics.interval import Coverage, Interval, fewest_units
from harness.results.verdict import ArmEvidence, why_other_work

# If the mean numbers of draft tokens per iteration differ by more than this, in logarithms (10 %), a
# server drafted with another K.
_OTHER_K = 0.1
# A part of a change is most of it from this share on.
_MOST_OF_IT = 0.8
# The most that a unit adds to the logarithm of a time per token, in units' worth.
_MOST_ADDED = 600.0
# Times change by about as much as the share of the processor that a program gets: sides whose shares differ by more
# than this were not measured under the same load.
_OTHER_SHARE = 0.05

Values = Mapping[Unit, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FigureOfPrompts(Figure):
    """A figure that every prompt has.

    Attributes:
        column: of the runs' own rows.
        by_unit: a run -> its value for each unit; empty where the rows of its prompts lack it.
        in_turns: whether it is a ratio of two arms that take turns, which the load of the machine slows alike.
    """

    column: str = field(kw_only=True)
    in_turns: bool = False
    by_unit: Callable[[Run[LatencyRow]], Values] = field(kw_only=True)


def changes_by_prompt(sides: Sides[LatencyRow]) -> list[Compared]:
    """The figures of `latency` that both sides have; without a verdict where they cannot be compared."""
    compared = [_compared_figure(figure, sides) for figure in _OF_PROMPTS]
    present = [change for change in compared if change is not None]
    reason = _why_not(sides)
    if not present:
        return [replace(sides.compared(_OF_PROMPTS[0]), reason=reason or _why_unread(sides))]
    if reason is not None:
        # Without the figures: they are of different work.
        return [replace(sides.compared(change.figure), reason=reason) for change in present]
    return [replace(present[0], split=_split(sides)), *present[1:]]


def _why_not(sides: Sides[LatencyRow]) -> str | None:
    """Why both sides cannot be compared; None where nothing is known against it."""
    for side, runs in (("before", sides.before), ("after", sides.after)):
        for run in runs:
            if run.status == NO_VERDICT:
                return f"{side}: no verdict: {run.last.error}"
    return why_other_work(_evidence(sides.before[-1]), _evidence(sides.after[-1]))


def _why_unread(sides: Sides[LatencyRow]) -> str:
    """Why there are no times of prompts, and where they should be."""
    unread = [run for run in sides.runs if not run.prompt_rows]
    reason = "the times in the prompts' files cannot be read"
    if unread:
        reason = "files of the prompts are gone (column directory)"
    places = {str(run.directory or run.file) for run in unread or sides.runs}
    return f"{reason}: {', '.join(sorted(places))}"


def _evidence(run: Run) -> ArmEvidence:
    row = run.last
    answers = [prompt for prompt in run.prompt_rows if prompt.arm == row.arm and prompt.is_timed]
    return ArmEvidence.of(
        vars(row),
        lengths={prompt.prompt_index: prompt.num_tokens for prompt in answers},
        drawn=row.ignore_eos is False and bool(row.temperature),
    )


def _noise(figure: FigureOfPrompts, runs: Sequence[Run]) -> Noise | None:
    """How far apart runs with the same settings are; None for a figure that is not timed."""
    values = _by_run(runs, figure) if figure.timed else []
    units = _common_units(values)
    return noise_of_runs([_matrix(values, units)]) if len(values) > 1 and units else None


def _compared_figure(figure: FigureOfPrompts, sides: Sides[LatencyRow]) -> Compared | None:
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
    unit = "prompt" if all(len(unit) == 1 for unit in units) else "lap"
    coverages = [Coverage.of(run.last.speedup) for run in sides.runs]
    if all(coverage is not None and coverage.unit == "block" for coverage in coverages):
        unit = "block"
    noise = _noise(figure, sides.noise)
    comparison = compare(before, after, figure.better, sides.margin, noise, unit=unit)
    verdict = comparison.verdict
    reason = ""
    if figure is _TOKENS_PER_ITERATION:
        reason = _other_k(sides)
    elif not figure.in_turns or any(run.last.interleaved is False for run in sides.runs):
        reason = _other_load(sides)
    if len(units) < fewest_units(unit):
        reason = f"{counted(len(units), unit)} on both sides, and {fewest_units(unit)} needed"
    elif not reason and figure.timed and noise is None and len(before) == len(after) == 1:
        reason = ONE_RUN
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


def _split(sides: Sides[LatencyRow]) -> str:
    """`all of it is acceptance: 3.19 → 2.66 tokens per iteration, 0.83 (0.80 to 0.87); 30.0 → 29.9 ms per iteration,
    the same: 1.00 (0.99 to 1.01)`, of the time per token after the first. Empty where one of them is unknown.
    """
    parts = [_compared_figure(figure, sides) for figure in (_TOKENS_PER_ITERATION, _ITERATION)]
    changes = [part.comparison.change for part in parts if part and part.comparison]
    are_known = len(changes) == len(parts) and all(change.has_bounds for change in changes)
    if not are_known or any(run.last.held_back for run in sides.runs):
        return ""
    effects = [_effect(change, sides.margin) for change in changes]
    if parts[1] is not None and not parts[1].needs_runs:
        # Such as under another load.
        effects[1] = "cannot tell"
    tokens, cost = (
        f"{change:.2f}" if effect == "changed" else f"{effect}: {change:.2f}"
        for effect, change in zip(effects, changes, strict=True)
    )
    yields, costs = (
        [_over_runs(figure, runs) for runs in (sides.before, sides.after)]
        for figure in (_TOKENS_PER_ITERATION, _ITERATION)
    )
    yielded = f"{yields[0]:.2f} → {yields[1]:.2f} tokens per iteration, {tokens}"
    spent = f"{costs[0]:.1f} → {costs[1]:.1f} ms per iteration, {cost}"
    return f"{_attributed(effects, changes)}{yielded}; {spent}"


def _effect(change: Interval, margin: float) -> str:
    """`changed`, `the same` within the margin, or `cannot tell`."""
    if change.excludes(1):
        return "changed"
    is_within = 1 - margin <= change.low and change.high <= 1 + margin
    return "the same" if is_within else "cannot tell"


def _attributed(effects: Sequence[str], changes: Sequence[Interval]) -> str:
    """What a change of speed is due to: `all of it is acceptance: `; empty where that cannot be told, or both are."""
    # Of a change in logarithms, of which both are parts.
    logs = [abs(math.log(change.estimate)) for change in changes]
    for index, name in enumerate(("acceptance", "the cost of an iteration")):
        other = effects[1 - index]
        is_most = logs[index] >= _MOST_OF_IT * sum(logs)
        if effects[index] == "changed" and is_most and other != "cannot tell":
            return f"{'most' if other == 'changed' else 'all'} of it is {name}: "
    return ""


def _over_runs(figure: FigureOfPrompts, runs: Sequence[Run]) -> float:
    """The geometric mean over runs."""
    values = [value for by_unit in _by_run(runs, figure) for value in by_unit.values()]
    return math.exp(fmean(map(math.log, values)))


def _own_figure(figure: FigureOfPrompts, runs: Sequence[Run]) -> float | None:
    """The mean over runs of the figure that their own pages show; None where none shows it."""
    values = [run.last.values()[figure.column] for run in runs]
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _other_k(sides: Sides[LatencyRow]) -> str:
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


def _other_load(sides: Sides[LatencyRow]) -> str:
    """Why times of both sides cannot be compared: other programs, or drift, disturbed one side more than the other.
    Empty where they did not.

    Repeated runs follow each other closely, so that their spread does not show a load that came or went between
    the sides.
    """
    both = (sides.before, sides.after)
    shares = [[share for run in runs if (share := _processor_share(run))] for runs in both]
    if all(shares):
        before, after = map(fmean, shares)
        if abs(after - before) > _OTHER_SHARE:
            return f"the load differed: {percent(before)} of the CPU time it wanted before, {percent(after)} after"
    disturbed = [sum(not run.last.was_quiet for run in runs) for runs in both]
    are_busy = [2 * number > len(runs) for number, runs in zip(disturbed, both, strict=True)]
    if are_busy[0] == are_busy[1]:
        return ""
    counts = [f"{number} of {len(runs)}" for number, runs in zip(disturbed, both, strict=True)]
    return f"the load differed: {counts[0]} runs before were disturbed, {counts[1]} after"


def _processor_share(run: Run) -> float | None:
    """The share of the processor time that a run got, of what computed here; None of a server elsewhere."""
    row = run.last
    return row.processor_share if row.url is None or row.server_command else None


def _by_run(runs: Iterable[Run], figure: FigureOfPrompts) -> list[Values]:
    """The figure in each run that has it."""
    values = [figure.by_unit(run) for run in runs]
    return [by_unit for by_unit in values if by_unit]


def _by_common_seed(
    sides: Sides[LatencyRow], figure: FigureOfPrompts
) -> tuple[list[Values], list[Values]] | None:
    """The figure in runs with the same seeds before and after, in the same order; else None."""
    before = {run.last.seed: figure.by_unit(run) for run in sides.before}
    after = {run.last.seed: figure.by_unit(run) for run in sides.after}
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


def _ms_per_token(run: Run[LatencyRow]) -> Values:
    """Of the arm that speculates, or of the only one."""
    return _ratios_of_totals(waits_by_unit(run.prompt_rows, run.last.arm or "regular"))


def _speedup(run: Run[LatencyRow]) -> Values:
    both = waits_of_both_arms(run.prompt_rows)
    regular = _ratios_of_totals({unit: wait for unit, (wait, _) in both.items()})
    speculative = _ratios_of_totals({unit: wait for unit, (_, wait) in both.items()})
    return {unit: regular[unit] / speculative[unit] for unit in both}


def _ratios_of_totals(totals: Mapping[Unit, tuple[float, float]]) -> Values:
    """Values of the units whose geometric mean is the ratio of totals over all units, as the run's own page has it:
    time per token over all tokens, tokens per iteration over all iterations.

    To its logarithm a unit adds its numerator over the mean one, less its denominator over their mean: a short answer,
    which has its whole wait for the first token in it, adds no more than its time.
    """
    if not totals:
        return {}
    mean_top = fmean(top for top, _ in totals.values())
    mean_bottom = fmean(bottom for _, bottom in totals.values())
    values = {}
    for unit, (top, bottom) in totals.items():
        # One of a thousand answers may hold nearly all of the time, which is beyond what a number can hold.
        added = min(top / mean_top - bottom / mean_bottom, _MOST_ADDED)
        values[unit] = mean_top / mean_bottom * math.exp(added)
    return values


def _tokens_per_iteration(run: Run[LatencyRow]) -> Values:
    """Tokens after the first over iterations; of servers that count these for each request."""
    units = rows_by_unit(run.prompt_rows, "speculative")
    if not any(row.num_iterations for rows in units.values() for row in rows):
        return {}
    totals = {unit: decoded_and_iterations(rows) for unit, rows in units.items()}
    # An answer of a single token has no iteration.
    return _ratios_of_totals({unit: pair for unit, pair in totals.items() if pair and pair[1]})


def _ms_per_iteration(run: Run[LatencyRow]) -> Values:
    """Time after the first token over iterations, where these are counted."""
    if not _tokens_per_iteration(run):
        return {}
    return _ratios_of_totals(spent_by_unit(run.last, run.prompt_rows))


_TOKENS_PER_ITERATION = FigureOfPrompts(
    name="tokens per iteration",
    better="higher",
    words=("more", "fewer"),
    column="tokens_per_iteration",
    by_unit=_tokens_per_iteration,
)
_ITERATION = FigureOfPrompts(
    name="ms per iteration",
    better="lower",
    words=("cheaper", "more expensive"),
    timed=True,
    column="ms_per_token",
    by_unit=_ms_per_iteration,
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
        in_turns=True,
        column="speedup",
        by_unit=_speedup,
    ),
    _TOKENS_PER_ITERATION,
)
