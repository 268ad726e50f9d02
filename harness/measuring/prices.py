"""The cost and yield of an iteration, from runs of `latency`: a sweep over K, or one run alone.

An iteration is timed over the tokens after an answer's first, which any server allows. A run of our own loop also times
its phases, and so has prices for the K below its own: an iteration drafts K tokens at c regular steps each and verifies
them in v steps (Leviathan et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

import numpy as np

from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.results.price.shape import Point, StartNoise
from harness.results.price.value import IterationCost, mean_time, why_queued
from harness.results.prompt_times import Unit, rows_by_unit
from harness.results.rows.prompts import LatencyPromptRow, decoded_and_iterations
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Coverage, Interval
from harness.results.statistics.iterations import fewest_iterations, tokens_over_iterations
from harness.results.statistics.ratios import ratio_of_totals

# Iterations that draft fewer than this share of K cost what the text lets them draft.
_LEAST_DRAFTED = 0.75
# As a share of a pass over one token. Noise below it moves a prediction by less.
_TOLERATED_NOISE = 0.2
# An iteration has a pass of the target, so that it takes a regular step at least. Starts of one program differ by some
# per cent, and times on a busy machine by more: what is further below was not measured right.
_LEAST_STEPS = 0.8
# Points of several runs with the same place are averaged.
_PLACE = attrgetter("rows", "width")


class Spent(NamedTuple):
    """Milliseconds after the first token, and iterations in them; of the regular arm each token is one."""

    ms: float
    iterations: float


def iteration_cost(runs: Sequence[Run[LatencyRow]], source: str = "") -> IterationCost:
    """The price of an iteration, from runs with one draft that differ in K and rows in flight.

    Points that several runs measured are means over these. What follows from the phases of a run counts where no run
    measured it.
    """
    measured: list[Point] = []
    points_by_phases: list[Point] = []
    refused: dict[int, str] = {}
    for run in runs:
        row = run.last
        load = _load(row)
        run_points = points_of(run)
        points_by_phases += _points_by_phases(run, run_points)
        if load is None:
            continue
        reason = why_queued(load, _waits(run))
        if load > 1 and reason:
            refused[load] = reason
        measured += [point for point in run_points if point.width == 1 or not _drafts_less(row)]
    by_place = grouped(measured, _PLACE)
    for point in points_by_phases:
        by_place.setdefault(_PLACE(point), [point])
    return IterationCost(_means(by_place), source, refused)


def measured_over_k(runs: Sequence[Run[LatencyRow]]) -> IterationCost:
    """The iterations of runs of one pair that differ in K, as they were measured: nothing follows from phases."""
    points = [point for run in runs for point in points_of(run)]
    noise = {}
    for rows, load_points in grouped(points, attrgetter("rows")).items():
        noise[rows] = StartNoise.of(
            [point.ms.estimate for point in load_points if point.width == 1]
        )
    return IterationCost(_means(grouped(points, _PLACE)), start_noise=noise)


def _means(by_place: Mapping[tuple[int, int], Sequence[Point]]) -> list[Point]:
    """One point for each load and width, the mean over the runs that measured it."""
    means = []
    for (rows, width), several in sorted(by_place.items()):
        steps = [point.steps for point in several if point.steps.is_known]
        lengths = [point.answer_length for point in several if point.answer_length]
        means.append(
            Point(
                width,
                rows,
                mean_time([point.ms for point in several]),
                mean_time(steps) if steps else Interval(),
                float(np.mean([point.drafted for point in several])),
                float(np.mean(lengths)) if lengths else None,
            )
        )
    return means


def points_of(run: Run[LatencyRow]) -> list[Point]:
    """The regular step of a run, and its iteration; [] where both are unknown."""
    row = run.last
    load = _load(row)
    if load is None:
        return []
    coverage = Coverage.of(row.speedup)
    unit_name = coverage.unit if coverage else "prompt"
    points = []
    regular = run.row("regular")
    step_ms = None if regular is None else _step_ms(regular)
    step_times: dict[Unit, Spent] = {}
    if step_ms and step_ms > 0 and regular is not None:
        step_times = spent_by_unit(regular, run.prompt_rows)
        ms = _time(step_times, unit_name, step_ms)
        points.append(Point(1, load, ms, Interval(1.0), answer_length=regular.mean_answer_length))
    iteration_ms = _iteration_ms(row)
    k = k_of(row)
    # A damaged file may say less than nothing.
    if row.arm != "speculative" or not iteration_ms or iteration_ms <= 0 or k is None:
        return points
    iteration_times = spent_by_unit(row, run.prompt_rows)
    steps = Interval(iteration_ms / step_ms) if step_ms else Interval()
    common = sorted(iteration_times.keys() & step_times.keys())
    if common:
        both = np.array([[*iteration_times[unit], *step_times[unit]] for unit in common])
        ms, num_iterations, step_ms_spent, num_steps = both.T
        steps = ratio_of_totals([ms, num_steps], [num_iterations, step_ms_spent], unit_name)
    if steps.estimate < _LEAST_STEPS:
        return points
    time = _time(iteration_times, unit_name, iteration_ms)
    drafted, answer_length = row.mean_num_draft_tokens, row.mean_answer_length
    points.append(Point(k + 1, load, time, steps, drafted, answer_length))
    return points


def _points_by_phases(run: Run[LatencyRow], own_points: Sequence[Point]) -> list[Point]:
    """Prices of the K below that of a run with phases, whose shorter proposals begin its own: what is drafted and
    verified less is taken off.

    Args:
        own_points: its own, `points_of`.
    """
    regular, row = run.row("regular"), run.last
    costs = costs_in_steps(regular, row)
    step_ms = None if regular is None else _step_ms(regular)
    if costs is None or not step_ms or _drafts_less(row) or not yields_by_k(row):
        return []
    phases = steps_by_k(row, costs) or steps_by_k(row, costs, by_width=False)
    measured = next((point for point in own_points if point.width > 1), None)
    if not phases or measured is None or not measured.steps.is_known:
        return []
    k = measured.width - 1
    points = []
    for smaller, steps in phases.items():
        # The rest of an iteration takes its time at any K.
        share = 1 - (phases[k] - steps) / measured.steps.estimate
        if smaller < k and share > 0:
            ms, in_steps = measured.ms.scaled(share), measured.steps.scaled(share)
            points.append(Point(smaller + 1, measured.rows, ms, in_steps))
    return points


class StepCosts(NamedTuple):
    """Times in regular steps: of drafting one token (c), and of verifying all K (v)."""

    draft: float
    verify: float


def costs_in_steps(regular: LatencyRow | None, row: LatencyRow) -> StepCosts | None:
    """Measured costs; None where one of them is unknown."""
    if regular is None or row.draft_ms is None or row.verify_ms is None:
        return None
    step_ms = regular.target_step_ms
    proposed = row.mean_num_draft_tokens
    if not step_ms or not proposed:
        return None
    # Both times are of a whole iteration.
    return StepCosts(row.draft_ms / proposed / step_ms, row.verify_ms / step_ms)


def steps_by_k(row: LatencyRow, costs: StepCosts, *, by_width: bool = True) -> dict[int, float]:
    """The cost of an iteration in regular steps at each K up to that of a run, by its phases.

    {} where K varied, and where a pass over more tokens was so much faster than one over fewer that the cost of
    verifying fewer is unknown.

    Args:
        by_width: whether verifying takes what timed passes do, where there are any; else each token adds the same. The
            rest, the verdict, costs the same for every K.
    """
    k_of_run, proposed = row.num_draft_tokens, row.mean_num_draft_tokens
    if not isinstance(k_of_run, int) or not proposed:
        return {}
    ks = np.arange(1, k_of_run + 1)
    verify_steps = 1 + ks * (costs.verify - 1) / proposed
    # Milliseconds by the draft tokens that a pass verifies: 0 where it is over one token.
    passes = enumerate(row.pass_ms_by_width or [])
    timed = {k: ms for k, ms in passes if ms is not None} if by_width else {}
    if 0 in timed and abs(costs.verify - 1) > _TOLERATED_NOISE:
        tolerated = _TOLERATED_NOISE * timed[0]
        in_order = combinations(timed.values(), 2)
        if any(narrower - wider > tolerated for narrower, wider in in_order):
            return {}
    if {0, k_of_run} <= timed.keys():
        # No pass takes less time than one over fewer tokens, except by noise.
        slowest_so_far = np.maximum.accumulate([*timed.values()]) / timed[0]
        pass_steps = np.interp(ks, [*timed], slowest_so_far)
        saved = pass_steps[-1] - pass_steps
        if pass_steps[-1] > max(costs.verify, 1):
            # Timed by themselves, passes seem to cost more than the whole verification.
            saved *= (costs.verify - 1) / (pass_steps[-1] - 1)
        verify_steps = costs.verify - saved
    # An iteration has a pass of the target, whatever noise makes of its parts.
    steps = np.maximum(1.0, costs.draft * ks + verify_steps)
    return dict(enumerate(steps.tolist(), start=1))


def yields_by_k(row: LatencyRow) -> dict[int, Interval]:
    """Tokens per iteration with K = 1, 2, ... of the same answers; {} where these are not known."""
    return dict(enumerate(row.tokens_per_iteration_by_num_draft_tokens or [], start=1))


def _drafts_less(row: LatencyRow) -> bool:
    """Whether iterations often draft fewer than K, so that their mean time is that of a text."""
    k, drafted = k_of(row), row.mean_num_draft_tokens
    return k is not None and drafted is not None and drafted < _LEAST_DRAFTED * k


def tokens_by_k(runs: Sequence[Run[LatencyRow]]) -> dict[int, Interval]:
    """Tokens per iteration at each K, with intervals over units and all repetitions of these. A smaller K follows from
    the run of a larger one.

    They do not depend on the load, and the same prompts at another load are no new evidence: the one with the most
    units counts.
    """
    yields: dict[int, Interval] = {}
    for k, runs_of_k in grouped(runs, lambda run: k_of(run.last)).items():
        if k is None:
            continue
        answers: dict[Unit, list[LatencyPromptRow]] = {}
        loads = grouped(runs_of_k, lambda run: run.last.batch_size).values()
        runs_at_load = max(
            loads, key=lambda same: len(rows_by_unit(same[0].prompt_rows, "speculative"))
        )
        for run in runs_at_load:
            for unit, rows in rows_by_unit(run.prompt_rows, "speculative").items():
                answers.setdefault(unit, []).extend(rows)
        are_reported = any(row.num_iterations for rows in answers.values() for row in rows)
        totals = [decoded_and_iterations(rows) for rows in answers.values()]
        coverage = Coverage.of(runs_at_load[0].last.speedup)
        if are_reported and None not in totals:
            # Answers of one token have no iteration.
            tokens, iterations = np.array([total for total in totals if total and total[1]]).T
            unit_name = coverage.unit if coverage else "prompt"
            lengths = ((row.num_tokens or 1) - 1 for rows in answers.values() for row in rows)
            fewest = fewest_iterations(lengths, k)
            yields[k] = tokens_over_iterations(tokens, iterations, fewest, unit_name)
        else:
            means = [run.last.tokens_per_iteration for run in runs_at_load]
            known = [mean for mean in means if mean]
            if len(known) == len(means):
                yields[k] = Interval(fmean(known))
    for run in runs:
        for smaller, tokens_of_smaller in yields_by_k(run.last).items():
            yields.setdefault(smaller, tokens_of_smaller)
    return dict(sorted(yields.items()))


def k_of(row: LatencyRow) -> int | None:
    """K of a run; of a running server the positions that it counts. None where K varied."""
    if row.num_draft_tokens is None:
        return len(row.marginal_acceptance_by_position or ()) or None
    return row.num_draft_tokens if isinstance(row.num_draft_tokens, int) else None


def why_no_price(run: Run[LatencyRow]) -> str:
    """Why a run with a draft has no price that other texts could be given; empty where it has one."""
    row = run.last
    k, drafted = k_of(row), row.mean_num_draft_tokens
    if k is None:
        setting = "not reported" if row.num_draft_tokens is None else row.num_draft_tokens
        return f"K is {setting}: a price is that of one K (K=4)"
    if _drafts_less(row):
        return f"{drafted:.1f} tokens were drafted of K={k}: the text, or the size of a head's block, bounds a draft"
    if _load(row) is None:
        return "rows of a batch wait for each other, or requests came at a rate: keep some in flight (batch_size=4)"
    if any(each.held_back for each in run.rows):
        return "tokens were held back, so that the time of an iteration is unknown"
    if row.mean_answer_length == 1:
        return "answers have one token, and no iteration"
    regular = run.row("regular")
    if regular is None or _step_ms(regular) is None:
        return "the regular arm was not measured without a draft"
    if _iteration_ms(row) is None:
        return "tokens per iteration are not reported"
    if len(points_of(run)) < 2:
        return "an iteration took less time than the regular step in it"
    return ""


def spent_by_unit(row: LatencyRow, prompts: Sequence[LatencyPromptRow]) -> dict[Unit, Spent]:
    """Milliseconds after the first token and iterations of each unit of a row's arm.

    Of a server that reports no iterations, those that its tokens took at the run's mean.
    """
    per_iteration = (row.tokens_per_iteration or 1.0) if row.arm == "speculative" else 1.0
    units = {}
    for unit, rows in rows_by_unit(prompts, row.arm or "regular").items():
        ms = iterations = 0.0
        for answer in rows:
            ms += (answer.time_ms or 0.0) - (answer.time_to_first_token_ms or 0.0)
            num_decoded = (answer.num_tokens or 0) - (answer.time_to_first_token_ms is not None)
            iterations += answer.num_iterations or num_decoded / per_iteration
        if ms > 0 and iterations > 0:
            units[unit] = Spent(ms, iterations)
    return units


def _time(spent: Mapping[Unit, Spent], unit_name: str, mean_ms: float) -> Interval:
    """The time of an iteration, with an interval over units where these are known."""
    if not spent:
        return Interval(mean_ms)
    ms, iterations = np.array([*spent.values()]).T
    return ratio_of_totals([ms], [iterations], unit_name)


def _load(row: LatencyRow) -> int | None:
    """Rows in flight; None where rows of a batch wait for each other, and of requests at a rate."""
    rows = row.batch_size or 1
    if rows > 1 and not row.was_served:
        return None
    return None if row.offered_rate else rows


def _waits(run: Run[LatencyRow]) -> float:
    """The time of a speculative answer over that of decoding it, over the same of a regular one; 1 where unknown."""
    ratios = []
    for row in (run.last, run.row("regular")):
        if row is None or not row.ms_per_token or not row.ms_per_token_after_first:
            return 1.0
        ratios.append(row.ms_per_token / row.ms_per_token_after_first)
    return ratios[0] / ratios[1]


def _iteration_ms(row: LatencyRow) -> float | None:
    """The time of an iteration; None where it is unknown."""
    ms_per_token = row.ms_per_token_after_first
    tokens = row.tokens_per_iteration
    if ms_per_token is None or tokens is None:
        return None
    return ms_per_token * tokens


def _step_ms(regular: LatencyRow) -> float | None:
    """The time of a regular step; None where it is unknown, and of a first command, which may draft too."""
    is_regular = regular.arm == "regular" and regular.draft != SECOND_COMMAND
    return regular.ms_per_token_after_first if is_regular and not regular.drafted else None
