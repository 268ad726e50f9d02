"""The page of one run of `latency`: the verdict, both arms, why, what to type next, and the figures behind it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.commands.latency.tables.costs import (
    best_of,
    held_back,
    predicted_by_k,
    share_of_iteration,
)
from harness.commands.latency.tables.doubts import doubts, num_target_gpus, two_digits
from harness.commands.latency.tables.published import Measured, published_tables
from harness.commands.latency.tables.reason import choice_of_k, not_reported, rises
from harness.commands.latency.tables.run import has_verdict, headline, run_tables, was_measured
from harness.config.amounts import SECONDS, counted, percent, quantity
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.prices import costs_in_steps
from harness.measuring.rows import LatencyRow
from harness.reporting.names import name_of
from harness.reporting.page import Page, Step, heading
from harness.reporting.table import Bar, Bars
from harness.reporting.words import arm_name, settings_line, typed_again
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage
from harness.results.statistics.stopping import half_width
from harness.results.verdict import verdict_of

# More prompts than this are not asked for: such a small difference is none that matters.
_MOST_PROMPTS = 500
# The tokens of iterations that drafted are named where they are this many times those of all.
_MORE_WHERE_DRAFTED = 1.1
# A smaller one is none either.
_LEAST_DIFFERENCE = 0.005


def page_of_run(
    rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow] = ()
) -> Page | None:
    """The page of one run; None where nothing was measured.

    Args:
        rows: of the run, the regular arm first.
        prompts: rows of its prompts file.
    """
    if not was_measured(rows):
        return None
    last = rows[-1]
    measured = [row for row in rows if row.ms_per_token is not None]
    regular = rows[0] if rows[0].arm == "regular" else None
    ours = [Measured(name_of(last).label(), last, regular)] if last.status == "ok" else []
    return Page(
        heading(last, settings_line(rows)),
        [headline(last)] if has_verdict(rows) else [],
        doubts(rows, prompts),
        [
            Bars(tuple(map(_bar, measured))),
            *run_tables(rows, prompts),
            *published_tables(ours),
        ],
        [
            *(("Why", why) for why in _reasons(rows)),
            *(("Checked", held) for held in _checked(rows)),
            *(("Ended", end) for end in _end(last)),
        ],
        [*_next_steps(rows)],
    )


def _bar(row: LatencyRow) -> Bar:
    first_ms = row.time_to_first_token_ms
    figures = (
        f"{row.ms_per_token:.2f} ms/token",
        f"{row.tokens_per_second:.1f} tokens/s" if row.tokens_per_second else "",
        f"first token {first_ms:.1f} ms" if first_ms else "",
    )
    return Bar(arm_name(row), row.ms_per_token or 0.0, figures)


def _reasons(rows: Sequence[LatencyRow]) -> Iterator[str]:
    """Acceptance and its price; of a loss also what causes it."""
    regular, row = rows[0], rows[-1]
    tokens = row.tokens_per_iteration
    reasons = []
    if row.acceptance_rate is not None:
        reasons.append(f"{100 * row.acceptance_rate:.0f} % accepted")
    # Beside other programs the price of an iteration is theirs too.
    is_quiet = not any(arm.was_starved for arm in rows)
    costs = costs_in_steps(regular, row) if is_quiet else None
    steps = 0.0
    if costs is not None:
        steps = (row.mean_num_draft_tokens or 0.0) * costs.draft + costs.verify
    if tokens is not None and steps > 0:
        gain = f"decode-only {tokens / steps:.2f}×"
        reasons.append(f"{tokens:.1f} tokens in the time of {steps:.2f} steps, {gain}")
    elif tokens is not None:
        reasons.append(f"{tokens:.1f} tokens per iteration{_where_drafted(row)}")
    share = share_of_iteration(rows) if is_quiet else None
    if share is not None and row.was_served:
        reasons[-1] += f"; a regular step is {100 * share:.0f} % of an iteration's time"
    if not reasons:
        # Of two commands neither need draft.
        may_draft = row.draft != SECOND_COMMAND
        if row.is_elsewhere and row.arm == "speculative" and may_draft:
            why = not_reported(row)
            was_not_drafted = row.drafted is False or row.is_simulated
            yield why if was_not_drafted else f"acceptance is {why}"
        return
    yield ": ".join(reasons)
    limit = held_back(regular, row)
    if limit is not None and row.speedup is not None and row.speedup.estimate < 1:
        yield limit


def _checked(rows: Sequence[LatencyRow]) -> Iterator[str]:
    """What might have spoilt a comparison and did not, as far as it is known; and how far the regular arm is from
    itself.
    """
    regular, row = rows[0], rows[-1]
    if not has_verdict(rows) or not row.speedup or row.is_simulated:
        return
    held = []
    if row.num_tokens is not None and regular.num_tokens == row.num_tokens:
        held.append("equal work")
    if row.identical_prompts is not None and row.identical_prompts == row.num_prompts:
        held.append("equal texts")
    cached = [arm.cached_tokens for arm in (regular, row)]
    if cached == [0, 0]:
        held.append("caches cold")
    if [arm.foreign_tokens for arm in (regular, row)] == [0, 0]:
        held.append("no other client")
    if regular.drafted is False and row.drafted:
        held.append("regular arm drafted nothing")
    if not any(arm.was_starved for arm in rows):
        if row.drift is not None and row.drift.has_bounds and not row.drifted:
            held.append("steady")
        if row.processor_share is not None:
            held.append("machine quiet")
    if row.num_units and not any(arm.num_throttled_units for arm in (regular, row)):
        held.append("clocks not lowered")
    null = row.regular_against_itself
    if null is not None:
        held.append(
            f"regular arm against itself {null.estimate:.3f} ({null.low:.3f} to {null.high:.3f})"
        )
    if held:
        yield " · ".join(held)


def _where_drafted(row: LatencyRow) -> str:
    """` (5.0 in those that drafted)`; empty where nearly all iterations did."""
    length = row.mean_acceptance_length
    if length is None or length < _MORE_WHERE_DRAFTED * (row.tokens_per_iteration or 0.0):
        return ""
    # Else accepted tokens behind the ends of answers make the difference.
    if (row.mean_proposed or length) <= (row.mean_num_draft_tokens or 0.0):
        return ""
    return f" ({length:.1f} in those that drafted)"


def _end(row: LatencyRow) -> Iterator[str]:
    """What ended a run with `precision`, and how precise it is."""
    if row.stopped_by is None or row.speedup is None:
        return
    coverage = Coverage.of(row.speedup)
    num_prompts = counted(row.num_prompts or 0, "prompt")
    ends = {
        "budget": "the budget was spent",
        "num_prompts": f"num_prompts={row.num_prompts} was reached",
        "prompts": "all prompts were asked",
    }
    if coverage is not None:
        ends["blocks"] = f"{counted(coverage.num_units, 'block')} were measured"
    end = ends.get(row.stopped_by)
    if not row.speedup.has_bounds:
        if end is not None:
            yield f"{end} after {num_prompts}: no interval"
        return
    reached = half_width(row.speedup)
    figures = f"half of the interval's width is {two_digits(reached)} after {num_prompts}"
    asked = row.precision
    if asked is None or reached <= asked:
        yield f"as precise as asked: {figures}"
        return
    yield f"not as precise as asked ({two_digits(asked)}): {end}"
    yield figures


def _next_steps(rows: Sequence[LatencyRow]) -> Iterator[Step]:
    """What would make the answer better, the most useful first."""
    regular, row = rows[0], rows[-1]
    if row.test:
        yield Step("measure", "test=false")
        return
    if row.arm == "speculative" and row.url is not None and row.regular_url is None:
        yield Step("is it faster than without a draft?", f"regular_url={_regular(row)}")
        return
    if row.status != "ok" or not has_verdict(rows):
        # Of a run that failed the same would fail again.
        return
    num_gpus = num_target_gpus(row)
    number = row.num_draft_tokens
    if num_gpus > 1 and row.repository and row.draft_repository and isinstance(number, int):
        draft = {"model": row.draft_repository, "num_speculative_tokens": number}
        server = ["vllm", "serve", row.repository, "--tensor-parallel-size", str(num_gpus)]
        typed = shlex.join([*server, "--speculative-config", json.dumps(draft)])
        yield Step("all GPUs at once", command=f"harness latency -- {typed}")
    verdict = verdict_of(row)
    coverage = Coverage.of(row.speedup)
    # An interval is over units: prompts, batches, or laps.
    # The last batch may not be full.
    prompts_per_unit = math.ceil((row.num_prompts or 1) / (coverage.num_units if coverage else 1))
    if coverage is not None and not verdict.speedup.has_bounds and row.stopped_by == "budget":
        yield from _larger_budget(row, coverage)
    elif coverage is not None and not verdict.speedup.has_bounds and coverage.unit == "block":
        yield Step("an interval", "engine.blocks=4")
    elif coverage is not None and not verdict.speedup.has_bounds:
        are_asked_again = coverage.unit == "prompt" and (row.num_prompts or 0) > coverage.num_units
        if are_asked_again:
            yield Step(f"an interval needs {FEWEST_FOR_INTERVAL} different prompts", "prompts=FILE")
        else:
            number = FEWEST_FOR_INTERVAL * prompts_per_unit
            yield Step("an interval", f"num_prompts={number}")
    elif verdict.speedup.has_bounds and verdict.reason:
        # Such as on a busy machine.
        again = typed_again("resume=false")
        yield Step("one thread, or a quiet machine", command=f"OMP_NUM_THREADS=1 {again}")
    elif row.has_same_command and coverage is not None and coverage.unit != "block":
        yield Step("what their starts change", "engine.blocks=4")
    elif verdict.includes_1 and coverage is not None and coverage.num_runs is not None:
        # Prompts do not narrow what varies from run to run.
        yield Step("a narrower interval", f"repeats={2 * coverage.num_runs}")
    elif verdict.includes_1 and row.visible_difference and coverage and not row.has_one_server:
        # What can be seen shrinks with the root of the units. (Where both arms are one server there is nothing to see.)
        distance = abs(math.log(verdict.speedup.estimate))
        num_units = coverage.num_units * (row.visible_difference / max(distance, 1e-3)) ** 2
        num_units = max(num_units, 2 * coverage.num_units)
        number = math.ceil(num_units) * prompts_per_unit
        if number <= _MOST_PROMPTS and distance >= _LEAST_DIFFERENCE:
            yield Step(
                f"to see a difference of {percent(distance)}",
                f"num_prompts={number}",
            )
    predictions = predicted_by_k(regular, row)
    if predictions:
        best = best_of(predictions)
        gain = predictions[best].estimate
        choice = choice_of_k(predictions)
        if gain <= 1:
            yield from _other_drafts(rows, choice)
        elif best < max(predictions):
            yield Step(f"{choice}, {gain:.2f}× predicted", f"K={best}")
        elif rises(predictions):
            yield Step(choice, f"K={2 * best}")
    elif verdict.conclusion == "slower":
        yield from _other_drafts(rows, "it does not pay")
    is_shown = row.server_command is not None and not row.has_same_command
    if is_shown and verdict.has_interval and row.run:
        yield Step("to show it", command=f"harness report {_found_by(row)} format=row")
    if verdict.speedup.has_bounds and coverage is not None and coverage.num_runs is None:
        yield Step("how far off another run is", "repeats=5")


def _found_by(row: LatencyRow) -> str:
    """What `report` finds a run by: its id, or its directory where its results are not in results/."""
    directory = Path(row.directory or "")
    try:
        typed = (directory / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
    except OSError:
        typed = ""
    if "results.file=" not in typed:
        # The microseconds of its id would not fit beside another step.
        return str(row.run).partition(".")[0]
    here = Path.cwd()
    return shlex.quote(str(directory.relative_to(here) if here in directory.parents else directory))


def _larger_budget(row: LatencyRow, coverage: Coverage) -> Iterator[Step]:
    """The budget with which there would be enough units for an interval, with some room."""
    asked = (row.settings or {}).get("budget")
    seconds = quantity(asked, SECONDS) if isinstance(asked, str) else asked
    if seconds:
        enough = math.ceil(2 * seconds * FEWEST_FOR_INTERVAL / max(coverage.num_units, 1))
        yield Step("an interval", f"budget={enough}s")


def _other_drafts(rows: Sequence[LatencyRow], finding: str) -> Iterator[Step]:
    """A draft that costs nothing, where another one does not pay."""
    # What a server drafts with is in its command.
    if rows[-1].draft not in ("lookup", "suffix") and not rows[-1].is_elsewhere:
        yield Step(f"{finding}; a draft that costs nothing", "draft=lookup")


def _regular(row: LatencyRow) -> str:
    """The address of a server without the draft; of `harness serve` that is known."""
    is_ours = (row.server or "").startswith("harness ")
    if row.url is None or not is_ours or not row.url.endswith("/v1"):
        return "http://HOST:PORT/v1"
    return f"{row.url.removesuffix('/v1')}/regular/v1"
