"""What to type after one run of `latency`, or after many: the most useful step first."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Sequence
from operator import attrgetter

from harness.commands.latency.tables.answer import has_verdict
from harness.commands.latency.tables.costs import best_of, predicted_by_k
from harness.commands.latency.tables.doubts import num_target_gpus
from harness.commands.latency.tables.ranked import RankedRun
from harness.commands.latency.tables.reason import choice_of_k, rises
from harness.config.amounts import SECONDS, percent, quantity
from harness.measuring.rows import LatencyRow
from harness.reporting.page import Step
from harness.reporting.words import typed_again
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage
from harness.results.verdict import verdict_of

# More prompts than this are not asked for: such a small difference is none that matters.
_MOST_PROMPTS = 500
# A smaller one is none either.
_LEAST_DIFFERENCE = 0.005


def steps_after_run(rows: Sequence[LatencyRow]) -> list[Step]:
    """What would make the answer of a run better."""
    regular, row = rows[0], rows[-1]
    if row.test:
        return [Step("measure", "test=false")]
    if row.arm == "speculative" and row.url is not None and row.regular_url is None:
        changes = f"regular_url={_regular_url(row)}"
        return [Step("is it faster than without a draft?", changes)]
    if row.status != "ok" or not has_verdict(rows):
        # What failed would fail again.
        return []
    possible = [
        _all_gpus(row),
        _better_interval(row),
        _another_k(regular, row),
        _to_show(row),
        _another_run(row),
    ]
    return [step for step in possible if step is not None]


def _all_gpus(row: LatencyRow) -> Step | None:
    """A server whose GPUs take a step together, where the target's layers took turns on several."""
    num_gpus = num_target_gpus(row)
    number = row.num_draft_tokens
    is_known = row.repository and row.draft_repository and isinstance(number, int)
    if num_gpus < 2 or not is_known:
        return None
    draft = json.dumps({"model": row.draft_repository, "num_speculative_tokens": number})
    server = f"vllm serve {shlex.quote(str(row.repository))} --tensor-parallel-size {num_gpus}"
    command = f"harness latency -- {server} --speculative-config {shlex.quote(draft)}"
    return Step("all GPUs at once", command=command)


def _regular_url(row: LatencyRow) -> str:
    """The address of a server without the draft; of `harness serve` that is known."""
    is_ours = (row.server or "").startswith("harness ")
    if row.url is None or not is_ours or not row.url.endswith("/v1"):
        return "http://HOST:PORT/v1"
    return f"{row.url.removesuffix('/v1')}/regular/v1"


def _better_interval(row: LatencyRow) -> Step | None:
    """An interval where there is none, or a narrower one where it includes 1; None where the verdict needs neither."""
    verdict = verdict_of(row)
    coverage = Coverage.of(row.speedup)
    if verdict.speedup.has_bounds and verdict.reason:
        # Such as on a busy machine.
        again = typed_again("resume=false")
        return Step("one thread, or a quiet machine", command=f"OMP_NUM_THREADS=1 {again}")
    if coverage is None:
        return None
    if not verdict.speedup.has_bounds:
        return _first_interval(row, coverage)
    if not verdict.includes_1:
        return None
    if coverage.num_runs is not None:
        # Prompts do not narrow what varies from run to run.
        return Step("a narrower interval", f"repeats={2 * coverage.num_runs}")
    if not row.visible_difference or row.has_one_server or row.has_same_command:
        # Between equal arms there is nothing to see.
        return None
    # What can be seen shrinks with the root of the units.
    distance = abs(math.log(verdict.speedup.estimate))
    if distance < _LEAST_DIFFERENCE:
        return None
    num_units = coverage.num_units * (row.visible_difference / distance) ** 2
    num_prompts = _prompts_for(row, coverage, max(num_units, 2 * coverage.num_units))
    if num_prompts > _MOST_PROMPTS:
        return None
    return Step(f"to see a difference of {percent(distance)}", f"num_prompts={num_prompts}")


def _first_interval(row: LatencyRow, coverage: Coverage) -> Step | None:
    """What gives a run with too few units an interval; None for a budget that is not known."""
    if row.stopped_by == "budget":
        asked = (row.settings or {}).get("budget")
        seconds = quantity(asked, SECONDS) if isinstance(asked, str) else asked
        if not seconds:
            return None
        # With some room.
        enough = math.ceil(2 * seconds * FEWEST_FOR_INTERVAL / max(coverage.num_units, 1))
        return Step("an interval", f"budget={enough}s")
    if coverage.unit == "block":
        return Step("an interval", "engine.blocks=4")
    if coverage.unit == "prompt" and (row.num_prompts or 0) > coverage.num_units:
        # They were asked more than once.
        return Step(f"an interval needs {FEWEST_FOR_INTERVAL} different prompts", "prompts=FILE")
    num_prompts = _prompts_for(row, coverage, FEWEST_FOR_INTERVAL)
    return Step("an interval", f"num_prompts={num_prompts}")


def _prompts_for(row: LatencyRow, coverage: Coverage, num_units: float) -> int:
    """The prompts of so many units: prompts, batches or laps, of which the last one may not be full."""
    return math.ceil(num_units) * math.ceil((row.num_prompts or 1) / coverage.num_units)


def _another_k(regular: LatencyRow, row: LatencyRow) -> Step | None:
    """The K that promises most, or another draft where none pays."""
    predictions = predicted_by_k(regular, row)
    if not predictions:
        is_slower = verdict_of(row).conclusion == "slower"
        return _free_draft([row], "it does not pay") if is_slower else None
    best = best_of(predictions)
    gain = predictions[best].estimate
    choice = choice_of_k(predictions)
    if gain <= 1:
        return _free_draft([row], choice)
    if best < max(predictions):
        return Step(f"{choice}, {gain:.2f}× predicted", f"K={best}")
    return Step(choice, f"K={2 * best}") if rises(predictions) else None


def _free_draft(rows: Sequence[LatencyRow], finding: str) -> Step | None:
    """A draft that costs nothing, where others do not pay; None where one was measured."""
    # What a server drafts with is in its command.
    if any(row.is_elsewhere or row.draft in ("lookup", "suffix") for row in rows):
        return None
    return Step(f"{finding}; a draft that costs nothing", "draft=lookup")


def _to_show(row: LatencyRow) -> Step | None:
    """The row of a run for a table that others add theirs to; of servers that were started here."""
    is_shown = row.server_command is not None and not row.has_same_command
    if not is_shown or not verdict_of(row).has_interval or not row.directory:
        return None
    directory = shlex.quote(os.path.relpath(row.directory))
    return Step("to show it", command=f"harness report {directory} format=row")


def _another_run(row: LatencyRow) -> Step | None:
    coverage = Coverage.of(row.speedup)
    if coverage is None or coverage.num_runs is not None or not verdict_of(row).speedup.has_bounds:
        return None
    return Step("how far off another run is", "repeats=5")


def steps_after_runs(pairs: Sequence[RankedRun]) -> list[Step]:
    """The most useful step after many runs, if there is one."""
    if any(pair.why_not for pair in pairs):
        return [Step("each job several times, in turns", "repeats=5")]
    conclusive = [pair for pair in pairs if pair.best and pair.has_interval]
    if not conclusive:
        return []
    best = max(conclusive, key=attrgetter("shown", "speedup"))
    another_draft = _free_draft([pair.row for pair in pairs], "none is shown to pay")
    if not best.verdict.pays and another_draft is not None:
        return [another_draft]
    ks = {pair.name.k_order for pair in pairs if pair.name.group == best.name.group}
    if best.verdict.pays and isinstance(best.k, int) and len(ks) > 1 and best.k == max(ks):
        return [Step(f"K={best.k} is the largest measured", f"K={2 * best.k}")]
    if any("repeat" in (pair.row.settings or {}) or pair.run.times > 1 for pair in pairs):
        return []
    return [Step("how far off other runs may be", "repeats=5")]
