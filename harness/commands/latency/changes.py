"""How the times and the acceptance of a measurement changed, prompt by prompt, for `regress`.

Figures are compared over the units that all runs of both sides have: prompts, or batches or laps of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from harness.config.amounts import counted, percent
from harness.measuring.prices import spent_by_unit
from harness.measuring.rows import LatencyRow
from harness.reporting.changes import ONE_RUN, BeforeAndAfter, Compared
from harness.results.judging.change import Figure
from harness.results.prompt_times import Unit, rows_by_unit, waits_by_unit, waits_of_both_arms
from harness.results.rows.prompts import decoded_and_iterations
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.arrays import Floats
from harness.results.statistics.comparisons import Noise, compare, noise_of_runs
from harness.results.statistics.interval import fewest_units
from harness.results.verdict import ArmEvidence, why_other_work

# If the mean numbers of draft tokens per iteration differ by more than this, in logarithms (10 %), a
# server drafted with another K.
_OTHER_K = 0.1
# The most that a unit adds to the logarithm of a time per token, in units' worth.
_MOST_ADDED = 600.0
# Times change by about as much as the share of the processor that a program gets: sides whose shares differ by more
# than this were not measured under the same load.
_OTHER_SHARE = 0.05

Values = Mapping[Unit, float]


@dataclass(frozen=True)
class PromptFigure(Figure):
    """A figure that every prompt has.

    Attributes:
        by_unit: a run -> its value for each unit; empty where the rows of its prompts lack it.
        column: of the runs' own rows; empty for a figure that no row has.
        in_turns: whether it is a ratio of two arms that take turns, which the load of the machine slows alike.
    """

    by_unit: Callable[[Run[LatencyRow]], Values] = field(kw_only=True)
    column: str = ""
    in_turns: bool = False


def changes_by_prompt(sides: BeforeAndAfter[LatencyRow]) -> list[Compared]:
    """The figures of `latency` that both sides have; one row without figures where they cannot be compared."""
    reason = _why_not(sides)
    changes: list[Compared] = []
    for figure in _FIGURES:
        change = None if reason else _change(figure, sides)
        if change is not None:
            changes.append(change)
    if changes:
        return changes
    places = {str(run.directory or run.file) for run in sides.runs}
    unread = f"the times in the prompts' files cannot be read: {', '.join(sorted(places))}"
    return [sides.compared(_FIGURES[0], why=reason or unread)]


def _why_not(sides: BeforeAndAfter[LatencyRow]) -> str | None:
    """Why both sides cannot be compared; None where nothing is known against it."""
    for side, runs in (("before", sides.before), ("after", sides.after)):
        for run in runs:
            if run.status == NO_VERDICT:
                return f"{side}: no verdict: {run.last.error}"
    return why_other_work(_evidence(sides.before[-1]), _evidence(sides.after[-1]))


def _evidence(run: Run) -> ArmEvidence:
    row = run.last
    answers = [prompt for prompt in run.prompt_rows if prompt.arm == row.arm and prompt.is_timed]
    return ArmEvidence.of(
        vars(row),
        lengths={prompt.prompt_index: prompt.num_tokens for prompt in answers},
        drawn=row.ignore_eos is False and bool(row.temperature),
    )


def _change(figure: PromptFigure, sides: BeforeAndAfter[LatencyRow]) -> Compared | None:
    """One figure of a measurement; None where a side does not have it."""
    before = _values(figure, sides.before)
    after = _values(figure, sides.after)
    if not before or not after:
        return None
    seeds = [] if figure.timed else [seed for seed in before if seed in after]
    runs_before, runs_after = sides.before, sides.after
    if seeds:
        before = {seed: before[seed] for seed in seeds}
        after = {seed: after[seed] for seed in seeds}
        runs_before = [run for run in runs_before if run.last.seed in seeds]
        runs_after = [run for run in runs_after if run.last.seed in seeds]
    units = _common_units([*before.values(), *after.values()])
    if not units:
        return sides.compared(figure, why="no prompt has a time on both sides")
    before_table = _table(before, units)
    after_table = _table(after, units)
    mean_before = _mean(figure, runs_before, before_table)
    mean_after = _mean(figure, runs_after, after_table)
    if seeds:
        # Runs of one side differ because of their seeds, which the other side has too: that is no noise.
        before_table = np.exp(np.log(before_table).mean(axis=0))
        after_table = np.exp(np.log(after_table).mean(axis=0))
    unit = "prompt" if all(len(unit) == 1 for unit in units) else "lap"
    speedup = sides.after[-1].last.speedup
    if speedup is not None and speedup.covers is not None:
        unit = speedup.covers.unit
    noise = _noise(figure, sides.noise)
    comparison = compare(before_table, after_table, noise, unit)
    if len(units) < fewest_units(unit):
        reason = f"{counted(len(units), unit)} on both sides, and {fewest_units(unit)} needed"
    else:
        reason = _why_open(figure, sides)
        if not reason and figure.timed and noise is None and len(before) == len(after) == 1:
            reason = ONE_RUN
    compared = sides.compared(figure, comparison, reason)
    return replace(compared, mean_before=mean_before, mean_after=mean_after, noise=noise)


def _why_open(figure: PromptFigure, sides: BeforeAndAfter[LatencyRow]) -> str:
    """Why a figure of both sides cannot be compared; empty where nothing is known against it."""
    if not figure.timed:
        return _other_k(sides)
    if figure.in_turns and all(run.last.interleaved is not False for run in sides.runs):
        return ""
    return _other_load(sides)


def _other_k(sides: BeforeAndAfter[LatencyRow]) -> str:
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


def _other_load(sides: BeforeAndAfter[LatencyRow]) -> str:
    """Why times of both sides cannot be compared: other programs, or drift, disturbed one side more than the other.
    Empty where they did not.

    Repeated runs follow each other closely, so that their spread does not show a load that came or went between
    the sides.
    """
    shares = []
    counts = []
    are_busy = []
    for runs in (sides.before, sides.after):
        # None of a server elsewhere, which computes for others.
        here = [run.last for run in runs if run.last.url is None or run.last.server_command]
        shares.append([row.processor_share for row in here if row.processor_share is not None])
        num_disturbed = sum(not run.last.was_quiet for run in runs)
        counts.append(f"{num_disturbed} of {len(runs)}")
        are_busy.append(2 * num_disturbed > len(runs))
    if all(shares):
        before, after = map(fmean, shares)
        if abs(after - before) > _OTHER_SHARE:
            return f"the load differed: {percent(before)} of the CPU time it wanted before, {percent(after)} after"
    if are_busy[0] == are_busy[1]:
        return ""
    return f"the load differed: {counts[0]} runs before were disturbed, {counts[1]} after"


def _values(figure: PromptFigure, runs: Sequence[Run[LatencyRow]]) -> dict[Hashable, Values]:
    """The figure in each run that has it. Runs with the same seed differ in times alone."""
    values: dict[Hashable, Values] = {}
    for number, run in enumerate(runs):
        by_unit = figure.by_unit(run)
        if by_unit:
            values[number if figure.timed else run.last.seed] = by_unit
    return values


def _common_units(runs: Sequence[Values]) -> list[Unit]:
    """The units that all runs have."""
    return sorted(set.intersection(*map(set, runs)))


def _table(runs: Mapping[Hashable, Values], units: Sequence[Unit]) -> Floats:
    """The values of a figure, [num_runs, num_units]."""
    return np.array([[values[unit] for unit in units] for values in runs.values()])


def _mean(figure: PromptFigure, runs: Sequence[Run[LatencyRow]], table: Floats) -> float | None:
    """The mean over runs of what their own pages show, else of a table [num_runs, num_units] of the figure; None where
    no page shows it.
    """
    if not figure.column:
        return float(np.exp(np.log(table).mean()))
    shown = [run.last.values()[figure.column] for run in runs]
    numbers = [value for value in shown if value is not None]
    return fmean(numbers) if numbers else None


def _noise(figure: PromptFigure, runs: Sequence[Run[LatencyRow]]) -> Noise | None:
    """The noise between runs with the same settings; None for a figure that is not timed."""
    values = _values(figure, runs) if figure.timed else {}
    if len(values) < 2:
        return None
    units = _common_units([*values.values()])
    return noise_of_runs(_table(values, units)) if units else None


def _ms_per_token(run: Run[LatencyRow]) -> Values:
    """Milliseconds per token of the arm that speculates, or of the only one."""
    return _ratios_of_totals(waits_by_unit(run.prompt_rows, run.last.arm or "regular"))


def _speedup(run: Run[LatencyRow]) -> Values:
    both = waits_of_both_arms(run.prompt_rows)
    regular = _ratios_of_totals({unit: wait for unit, (wait, _) in both.items()})
    speculative = _ratios_of_totals({unit: wait for unit, (_, wait) in both.items()})
    return {unit: regular[unit] / speculative[unit] for unit in both}


def _tokens_per_iteration(run: Run[LatencyRow]) -> Values:
    """Tokens after the first over iterations; of servers that count these for each request."""
    units = rows_by_unit(run.prompt_rows, "speculative")
    if not any(row.num_iterations for rows in units.values() for row in rows):
        return {}
    totals = {unit: decoded_and_iterations(rows) for unit, rows in units.items()}
    # An answer of a single token has no iteration.
    return _ratios_of_totals({unit: pair for unit, pair in totals.items() if pair and pair[1]})


def _ms_per_iteration(run: Run[LatencyRow]) -> Values:
    """Time after the first token over iterations, where these are counted and no tokens were held back."""
    if not _tokens_per_iteration(run) or any(row.held_back for row in run.rows):
        return {}
    return _ratios_of_totals(spent_by_unit(run.last, run.prompt_rows))


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


_FIGURES = (
    PromptFigure(
        "ms per token",
        "lower",
        ("faster", "slower"),
        timed=True,
        column="ms_per_token",
        by_unit=_ms_per_token,
    ),
    PromptFigure(
        "speed-up",
        "higher",
        ("higher", "lower"),
        timed=True,
        in_turns=True,
        column="speedup",
        by_unit=_speedup,
    ),
    PromptFigure(
        "tokens per iteration",
        "higher",
        ("more", "fewer"),
        explains=True,
        column="tokens_per_iteration",
        by_unit=_tokens_per_iteration,
    ),
    PromptFigure(
        "ms per iteration",
        "lower",
        ("cheaper", "more expensive"),
        timed=True,
        explains=True,
        decides=False,
        by_unit=_ms_per_iteration,
    ),
)
