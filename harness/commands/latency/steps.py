"""Commands to type after one run of `latency`, or after many: the most useful step first."""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Sequence
from operator import attrgetter

from harness.commands.latency.answer import has_verdict
from harness.commands.latency.ranking import RankedRun, Schedule
from harness.config.amounts import percent
from harness.measuring.rows import LatencyRow
from harness.reporting.page import NextStep
from harness.reporting.words import typed_again
from harness.results.judging.statement import Statement
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage, Interval

# More prompts than this are not asked for: such a small difference is none that matters.
_MOST_PROMPTS = 500
# A smaller one is none either.
_LEAST_DIFFERENCE = 0.005


def steps_after_run(rows: Sequence[LatencyRow], verdict: Statement) -> list[NextStep]:
    """Steps that would improve the answer of a run.

    Args:
        verdict: whether it pays.
    """
    row = rows[-1]
    if row.arm == "speculative" and row.url is not None and row.regular_url is None:
        changes = "regular_url=http://HOST:PORT/v1"
        return [NextStep("is it faster than without a draft?", changes)]
    if row.status != "ok" or not has_verdict(rows) or row.max_new_tokens == 1:
        # What failed would fail again, and speculation decides no first token.
        return []
    possible = [
        _better_interval(row, verdict),
        _another_k(row, verdict),
        _to_show(row, verdict),
        _another_run(row, verdict),
    ]
    # The first reason for a command counts.
    by_command: dict[str, NextStep] = {}
    for step in possible:
        if step is not None:
            by_command.setdefault(step.changes or step.command, step)
    return [*by_command.values()]


def _better_interval(row: LatencyRow, verdict: Statement) -> NextStep | None:
    """An interval where there is none, or a narrower one where it includes 1; None for a conclusion, and where no
    difference is expected.
    """
    coverage = Coverage.of(row.speedup)
    has_bounds = verdict.interval.has_bounds
    if verdict.is_conclusion:
        return None
    if has_bounds and verdict.why:
        # Such as on a busy machine.
        again = typed_again("resume=false", command="latency")
        return NextStep("a quiet machine", command=again)
    if coverage is None:
        return None
    aim = "a narrower interval" if has_bounds else "an interval"
    if row.stopped_by == "budget":
        return NextStep(aim, "budget=null")
    # Prompts do not narrow what varies from run to run, or from start to start.
    if has_bounds and coverage.num_runs is not None:
        return NextStep(aim, f"repeats={2 * coverage.num_runs}")
    if coverage.unit == "block":
        return NextStep(aim, f"engine.blocks={max(4, 2 * coverage.num_units)}")
    prompts_per_unit = math.ceil((row.num_prompts or 1) / coverage.num_units)
    if coverage.unit == "prompt" and row.num_different_prompts is None:
        # `num_prompts` counts each turn of a conversation, and the setting each conversation.
        prompts_per_unit = 1
    if has_bounds:
        return _narrower(row, verdict.interval, coverage.num_units, prompts_per_unit)
    if coverage.unit == "prompt" and prompts_per_unit > 1:
        # They were asked more than once.
        return NextStep(f"{aim} needs {FEWEST_FOR_INTERVAL} different prompts", "prompts=FILE")
    num_units = FEWEST_FOR_INTERVAL
    if coverage.num_effective:
        num_units = math.ceil(num_units * coverage.num_units / coverage.num_effective)
    return NextStep(aim, f"num_prompts={num_units * prompts_per_unit}")


def _narrower(
    row: LatencyRow, speedup: Interval, num_units: int, prompts_per_unit: int
) -> NextStep | None:
    """The prompts that would show a difference, or runs where these would be too many."""
    difference = abs(math.log(speedup.estimate))
    are_equal = row.has_one_server or row.has_same_command or difference < _LEAST_DIFFERENCE
    if are_equal or not row.visible_difference:
        return None
    # What can be seen shrinks with the root of the units.
    more = max((row.visible_difference / difference) ** 2, 2)
    num_prompts = math.ceil(more * num_units) * prompts_per_unit
    if num_prompts > _MOST_PROMPTS:
        where = "" if row.was_quiet else ", on a quiet machine"
        return NextStep(f"a narrower interval{where}", "repeats=5")
    return NextStep(f"to see a difference of {percent(difference)}", f"num_prompts={num_prompts}")


def _another_k(row: LatencyRow, verdict: Statement) -> NextStep | None:
    """Measure several K; where this draft does not pay, one that costs nothing."""
    if verdict.relation == "below" and (step := _free_draft([row], "it does not pay")):
        return step
    # K of a server is in its command.
    is_fixed = row.is_elsewhere or not isinstance(row.num_draft_tokens, int)
    if is_fixed or not verdict.is_conclusion:
        return None
    return NextStep("which K gains most", "-m K=2,4,8")


def _free_draft(rows: Sequence[LatencyRow], finding: str) -> NextStep | None:
    """A draft that costs nothing, where others do not pay; None where one was measured."""
    # What a server drafts with is in its command.
    if any(row.is_elsewhere or row.draft == "lookup" for row in rows):
        return None
    return NextStep(f"{finding}; a draft that costs nothing", "draft=lookup")


def _to_show(row: LatencyRow, verdict: Statement) -> NextStep | None:
    """The row of a run for a table that others add theirs to; of servers that were started here."""
    is_shown = row.server_command is not None and not row.has_same_command
    if not is_shown or not verdict.is_judged or not row.directory:
        return None
    directory = shlex.quote(os.path.relpath(row.directory))
    return NextStep("to show it", command=f"harness report {directory} format=row")


def _another_run(row: LatencyRow, verdict: Statement) -> NextStep | None:
    coverage = Coverage.of(row.speedup)
    if coverage is None or coverage.num_runs is not None or not verdict.interval.has_bounds:
        return None
    return NextStep("how far off another run is", "repeats=5")


def steps_after_runs(pairs: Sequence[RankedRun], schedules: Sequence[Schedule]) -> list[NextStep]:
    """The loads that a schedule leaves out, and the most useful other step after many runs, if there is one."""
    return [*_loads_left_out(schedules), *_after_ranking(pairs)]


def _loads_left_out(schedules: Sequence[Schedule]) -> list[NextStep]:
    """Three loads, or fewer, in the first gap of a schedule."""
    for schedule in schedules:
        for before, after in itertools.pairwise(schedule.ranges):
            ratio = after.first / before.last
            between = {round(before.last * ratio ** (part / 4)) for part in (1, 2, 3)}
            loads = sorted(between - {before.last, after.first})
            if loads:
                typed = ",".join(map(str, loads))
                gap = f"{before.last + 1} to {after.first - 1} not measured"
                return [NextStep(gap, f"batch_size={typed}")]
    return []


def _after_ranking(pairs: Sequence[RankedRun]) -> list[NextStep]:
    if any(pair.series.why_not for pair in pairs):
        return [NextStep("each job several times, in turns", "repeats=5")]
    judged = [pair for pair in pairs if pair.is_best_of_draft and pair.member.is_judged]
    if not judged:
        return steps_without_interval(pairs)
    best = max(judged, key=attrgetter("member.rank"))
    if not best.member.verdict.pays:
        if any(pair.member.is_shown for pair in pairs):
            return [NextStep("what pays on a quiet machine", "repeats=5")]
        step = _better_interval(best.row, best.member.verdict)
        if all(pair.member.verdict.relation == "below" for pair in pairs if pair.member.is_judged):
            step = _free_draft([pair.row for pair in pairs], "none pays")
        return [step] if step else []
    loads = {pair.load for pair in pairs}
    paying = {pair.load for pair in pairs if pair.member.verdict.pays}
    at_loads = ""
    if paying != loads:
        at_loads = " batch_size=" + ",".join(f"{load:g}" for load in sorted(paying))
    ks = {pair.name.k_order for pair in pairs if pair.name.group == best.name.group}
    is_bounded = any(member.is_same_setting for member in best.series.members)
    if isinstance(best.k, int) and len(ks) > 1 and best.k == max(ks) and not is_bounded:
        return [NextStep(f"K={best.k} is the largest measured", f"K={2 * best.k}{at_loads}")]
    is_repeated = any((pair.row.repeats or 1) > 1 or pair.run.times > 1 for pair in pairs)
    return (
        [] if is_repeated else [NextStep("how far off other runs may be", f"repeats=5{at_loads}")]
    )


def steps_without_interval(pairs: Sequence[RankedRun]) -> list[NextStep]:
    """What gives an interval to the run with the most in flight, and so to all."""
    largest = max(pairs, key=attrgetter("load"))
    step = _better_interval(largest.row, largest.member.verdict)
    return [step] if step and largest.row.status == "ok" else []
