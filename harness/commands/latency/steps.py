"""Commands to type after one run of `latency`, or after many: the most useful step first."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from operator import attrgetter

from harness.commands.latency.answer import has_verdict
from harness.commands.latency.costs import (
    choice_of_k,
    predicted_by_k,
    still_rises,
)
from harness.commands.latency.ranking import RankedRun
from harness.config.amounts import percent
from harness.measuring.rows import LatencyRow
from harness.reporting.page import NextStep
from harness.reporting.words import typed_again
from harness.results.judging.expected import best_of
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage
from harness.results.verdict import verdict_of

# More prompts than this are not asked for: such a small difference is none that matters.
_MOST_PROMPTS = 500
# A smaller one is none either.
_LEAST_DIFFERENCE = 0.005


def steps_after_run(rows: Sequence[LatencyRow]) -> list[NextStep]:
    """Steps that would improve the answer of a run."""
    regular, row = rows[0], rows[-1]
    if row.arm == "speculative" and row.url is not None and row.regular_url is None:
        changes = "regular_url=http://HOST:PORT/v1"
        return [NextStep("is it faster than without a draft?", changes)]
    if row.status != "ok" or not has_verdict(rows) or row.max_new_tokens == 1:
        # What failed would fail again, and speculation decides no first token.
        return []
    possible = [
        _better_interval(row),
        _another_k(regular, row),
        _to_show(row),
        _another_run(row),
    ]
    return [step for step in possible if step is not None]


def _better_interval(row: LatencyRow) -> NextStep | None:
    """An interval where there is none, or a narrower one where it includes 1; None where the verdict needs neither."""
    verdict = verdict_of(row)
    has_bounds = verdict.interval.has_bounds
    if has_bounds and verdict.why:
        # Such as on a busy machine.
        again = typed_again("resume=false", command="latency")
        if row.server_command:
            return NextStep("a quiet machine", command=again)
        return NextStep("one thread, or a quiet machine", command=f"OMP_NUM_THREADS=1 {again}")
    coverage = Coverage.of(row.speedup)
    if coverage is None or (has_bounds and not verdict.includes_1):
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
    if not has_bounds:
        if coverage.unit == "prompt" and prompts_per_unit > 1:
            # They were asked more than once.
            return NextStep(f"{aim} needs {FEWEST_FOR_INTERVAL} different prompts", "prompts=FILE")
        num_units = FEWEST_FOR_INTERVAL
        if coverage.num_effective:
            num_units = math.ceil(num_units * coverage.num_units / coverage.num_effective)
        return NextStep(aim, f"num_prompts={num_units * prompts_per_unit}")
    difference = abs(math.log(verdict.interval.estimate))
    are_equal = row.has_one_server or row.has_same_command or difference < _LEAST_DIFFERENCE
    if are_equal or not row.visible_difference:
        return None
    # What can be seen shrinks with the root of the units.
    more = max((row.visible_difference / difference) ** 2, 2)
    num_prompts = math.ceil(more * coverage.num_units) * prompts_per_unit
    if num_prompts > _MOST_PROMPTS:
        return None
    return NextStep(f"to see a difference of {percent(difference)}", f"num_prompts={num_prompts}")


def _another_k(regular: LatencyRow, row: LatencyRow) -> NextStep | None:
    """The K that promises most, or another draft where none pays."""
    predictions = predicted_by_k(regular, row)
    if not predictions:
        is_slower = verdict_of(row).relation == "slower"
        return _free_draft([row], "it does not pay") if is_slower else None
    best = best_of(predictions)
    gain = predictions[best].estimate
    choice = choice_of_k(predictions)
    if gain <= 1:
        return _free_draft([row], choice)
    if best < max(predictions):
        return NextStep(f"{choice}, {gain:.2f}× predicted", f"K={best}")
    return NextStep(choice, f"K={2 * best}") if still_rises(predictions) else None


def _free_draft(rows: Sequence[LatencyRow], finding: str) -> NextStep | None:
    """A draft that costs nothing, where others do not pay; None where one was measured."""
    # What a server drafts with is in its command.
    if any(row.is_elsewhere or row.draft == "lookup" for row in rows):
        return None
    return NextStep(f"{finding}; a draft that costs nothing", "draft=lookup")


def _to_show(row: LatencyRow) -> NextStep | None:
    """The row of a run for a table that others add theirs to; of servers that were started here."""
    is_shown = row.server_command is not None and not row.has_same_command
    if not is_shown or not verdict_of(row).has_interval or not row.directory:
        return None
    directory = shlex.quote(os.path.relpath(row.directory))
    return NextStep("to show it", command=f"harness report {directory} format=row")


def _another_run(row: LatencyRow) -> NextStep | None:
    coverage = Coverage.of(row.speedup)
    if coverage is None or coverage.num_runs is not None or not verdict_of(row).interval.has_bounds:
        return None
    return NextStep("how far off another run is", "repeats=5")


def steps_after_runs(pairs: Sequence[RankedRun]) -> list[NextStep]:
    """The most useful step after many runs, if there is one."""
    if any(pair.series.why_not for pair in pairs):
        return [NextStep("each job several times, in turns", "repeats=5")]
    conclusive = [pair for pair in pairs if pair.is_best_of_draft and pair.member.has_interval]
    if not conclusive:
        return []
    best = max(conclusive, key=attrgetter("member.rank"))
    if not best.member.alone.pays:
        if any(pair.member.is_shown for pair in pairs):
            return [NextStep("what pays on a quiet machine", "repeats=5")]
        another_draft = _free_draft([pair.row for pair in pairs], "none is shown to pay")
        return [another_draft] if another_draft else []
    ks = {pair.name.k_order for pair in pairs if pair.name.group == best.name.group}
    if isinstance(best.k, int) and len(ks) > 1 and best.k == max(ks):
        return [NextStep(f"K={best.k} is the largest measured", f"K={2 * best.k}")]
    is_repeated = any((pair.row.repeats or 1) > 1 or pair.run.times > 1 for pair in pairs)
    return [] if is_repeated else [NextStep("how far off other runs may be", "repeats=5")]
