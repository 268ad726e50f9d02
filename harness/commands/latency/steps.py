"""The commands that a page suggests after one run of `latency`, or after many: a few at most, the most useful first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.commands.latency.ranking import RankedRun
from harness.measuring.rows import LatencyRow
from harness.reporting.page import NextStep
from harness.results.judging.series import best_of
from harness.results.judging.statement import Statement
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage

# No step suggests more prompts than this for an interval over prompts. Each lap or batch takes several prompts.
_MOST_PROMPTS = 500


def steps_after_run(row: LatencyRow, verdict: Statement) -> list[NextStep]:
    """The steps to suggest after a single run.

        the verdict is no conclusion      a better interval
        it is a conclusion                another draft or K; repeated runs, if there was only one
        the run failed or has one arm,
        or its answers have one token     none

    Args:
        row: the row of the speculative arm.
        verdict: the verdict on the run's speed-up.
    """
    if row.status != "ok" or row.speedup is None or row.max_new_tokens == 1:
        # A run that failed would fail again. The first token of an answer is never drafted, so answers of one token
        # cannot become faster.
        return []
    if not verdict.is_conclusion:
        return _better_interval(row, verdict)
    coverage = Coverage.of(row.speedup)
    is_repeated = coverage is None or coverage.num_runs is not None
    return [*_another_draft(row, verdict), *([] if is_repeated else [_OTHER_RUNS])]


_OTHER_RUNS = NextStep("how much runs vary", "repeats=5")
_QUIET = NextStep("on a quieter or larger machine", "resume=false")


def _better_interval(row: LatencyRow, verdict: Statement) -> list[NextStep]:
    """The step that narrows an interval that includes 1, or gives a run its first interval; [] if none would help.

    The first condition that applies decides:

        random weights; or a drift of a server that drafts
        from its earlier answers                               nothing
        interval that is not judged, or from a busy machine    measure again, reusing nothing
        identical arms, or it is unknown what is covered       nothing
        nothing was drafted                                    another draft
        the budget ended the run                               no budget
        interval over several runs, with bounds                twice as many runs
        interval over blocks                                   twice as many, but at least 4, with enough prompts
        interval over batches or laps                          more prompts; nothing for a server that drafts from its
                                                               earlier answers, if the set has too few
        interval over prompts, and the set has more            more prompts
        interval over all prompts of the set, with bounds      repeated runs
        otherwise                                              nothing

    Without *with bounds*, a line also applies to a run that has no interval yet.
    """
    coverage = Coverage.of(row.speedup)
    has_bounds = verdict.interval.has_bounds
    if row.weights == "random" or (row.drifted and row.draft_remembers):
        return []
    # With bounds, `why` can only mean that threads waited for a core.
    if has_bounds and (verdict.why or not row.was_quiet):
        return [_QUIET]
    if coverage is None or row.has_one_server or row.has_same_command:
        return []
    if row.mean_num_draft_tokens == 0:
        return _free_draft([row])
    aim = "a narrower interval" if has_bounds else "an interval"
    num_in_set = row.num_prompts_in_set or _MOST_PROMPTS
    if row.stopped_by == "budget":
        return [NextStep(aim, "budget=null")]
    # More prompts do not reduce the variation from run to run, or from start to start.
    if has_bounds and coverage.num_runs is not None:
        return [NextStep(aim, f"repeats={2 * coverage.num_runs}")]
    num_measured = row.num_prompts or 0
    if coverage.unit == "block":
        num_blocks = max(4, 2 * coverage.num_units)
        # Each block has at least one lap, and a lap at least as many prompts as are in flight.
        fewest = num_blocks * (row.batch_size or 1)
        more = f" num_prompts={fewest}" if fewest > num_measured else ""
        return [NextStep(aim, f"engine.blocks={num_blocks}{more}")]
    # Four times as many units halve the width of an interval.
    num_units = 4 * coverage.num_units if has_bounds else FEWEST_FOR_INTERVAL
    # If a few long answers dominate, the suggested number must contain enough *effective* units.
    if coverage.num_effective and not has_bounds:
        num_units = math.ceil(num_units * coverage.num_units / coverage.num_effective)
    if coverage.unit in ("lap", "batch"):
        enough = 4 * num_measured if has_bounds else num_units * (row.batch_size or 1)
        if row.draft_remembers and enough > num_in_set:
            # Prompts that are sent again would find their own answers.
            return []
        return [NextStep(aim, f"num_prompts={enough}")]
    # Sending the same prompts again gives no further units.
    num_units = min(num_units, num_in_set, _MOST_PROMPTS)
    if num_units > coverage.num_units and (has_bounds or num_units >= FEWEST_FOR_INTERVAL):
        return [NextStep(aim, f"num_prompts={num_units}")]
    return [NextStep(aim, "repeats=5")] if has_bounds else []


def _another_draft(row: LatencyRow, verdict: Statement) -> list[NextStep]:
    """Several K to try, or a free draft if this one makes decoding slower; [] if K is `auto` or set in a command."""
    if verdict.relation == "below":
        return _free_draft([row])
    # A server's K is set in its command.
    is_fixed = row.is_elsewhere or not isinstance(row.num_draft_tokens, int)
    return [] if is_fixed else [NextStep("which K is fastest", "-m K=2,4,8")]


def _free_draft(rows: Sequence[LatencyRow]) -> list[NextStep]:
    """A draft that costs nothing; [] if it was measured already, or the draft is set in a server's command."""
    if any(row.is_elsewhere or row.draft == "lookup" for row in rows):
        return []
    return [NextStep("a draft that costs nothing", "draft=lookup")]


def steps_after_runs(pairs: Sequence[RankedRun]) -> list[NextStep]:
    """The most useful step after many runs; [] if there is none.

    The first condition that applies decides:

        the regular arms of a series differ too much to rank runs    repeated runs
        no run has a speed-up                                        nothing
        a run on a busy machine has a higher speed-up                measure again, reusing nothing
        every run with an interval is slower                         a free draft
        the best run is not significantly faster                     a better interval for it
        the best K is the largest that was measured                  twice this K
        no run was repeated                                          repeated runs
    """
    if any(pair.series.why_not for pair in pairs):
        return [_OTHER_RUNS]
    best = best_of(pairs)
    if best is None:
        return []
    if any(not pair.row.was_quiet and (pair.speedup or 0) > (best.speedup or 0) for pair in pairs):
        return [_QUIET]
    judged = [pair.verdict for pair in pairs if pair.has_interval]
    if judged and all(verdict.relation == "below" for verdict in judged):
        return _free_draft([pair.row for pair in pairs])
    if not best.verdict.pays:
        return _better_interval(best.row, best.verdict)
    ks = {pair.name.k_order for pair in pairs if pair.name.group == best.name.group}
    if isinstance(best.k, int) and len(ks) > 1 and best.k == max(ks):
        return [NextStep(f"K={best.k} is the largest measured", f"K={2 * best.k}")]
    is_repeated = any((pair.row.repeats or 1) > 1 or pair.run.times > 1 for pair in pairs)
    return [] if is_repeated else [_OTHER_RUNS]


def steps_without_interval(pairs: Sequence[RankedRun]) -> list[NextStep]:
    """The step that gives an interval to runs of both arms that have none.

    It is the step of the run with the most requests in flight: that run needs the most prompts, so the step helps all.
    """
    whole = [pair for pair in pairs if pair.row.status == "ok" and not pair.is_arm_alone]
    lacking = [pair for pair in whole if not pair.verdict.interval.has_bounds]
    if not lacking:
        return []
    largest = max(lacking, key=lambda pair: pair.load)
    return _better_interval(largest.row, largest.verdict)
