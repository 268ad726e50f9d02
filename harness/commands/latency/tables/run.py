"""One run of `latency`: times of its arms, the speed-up with its interval, and the reason for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.commands.latency.tables.categories import Category, by_category, by_turn
from harness.commands.latency.tables.doubts import notes
from harness.commands.latency.tables.reason import costs_of_a_step, reason
from harness.config.amounts import counted
from harness.measuring.figures.requests import PERCENTILES
from harness.measuring.rows import LatencyRow
from harness.reporting.table import (
    Column,
    Line,
    Table,
    number,
    share,
    times,
    with_bounds,
)
from harness.reporting.words import arm_name, explained_by_rounding
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.schema import NO_VERDICT, ComparedRow
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, UNKNOWN, Coverage, Interval
from harness.results.verdict import verdict_of

# Share by which the requests in flight may differ from `batch_size` without a line.
_MOST_OFF = 0.02


def run_tables(rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow] = ()) -> list[Table]:
    """The figures behind the answer: times, acceptance, costs, categories, with notes.

    Args:
        rows: of the run, the regular arm first.
        prompts: rows of its prompts file.
    """
    regular = rows[0]
    last = rows[-1]
    tables = [_arms(rows)]
    requests = [row for row in rows if row.was_served]
    if requests:
        columns = (ARM[0], *REQUESTS)
        about = (*filter(None, [_load(requests)]), TIMES)
        tables.append(Table.of("requests", "", requests, columns, notes=about))
    is_alone = last.arm == "speculative" and len(rows) == 1
    if has_verdict(rows) or is_alone:
        tables += reason(regular, last)
    else:
        tables.append(costs_of_a_step(regular, last))
    if last.status != NO_VERDICT:
        tables += _divided("categories", "category", by_category(prompts, last))
        tables += _divided("turns", "turn", by_turn(prompts, last))
    about_run = filter(None, [_decode_only(last), _compared_texts(last, prompts), *notes(rows)])
    tables[0] = replace(tables[0], notes=(*tables[0].notes, *about_run))
    return tables


def was_measured(rows: Sequence[LatencyRow]) -> bool:
    return any(row.ms_per_token is not None for row in rows)


def has_verdict(rows: Sequence[LatencyRow]) -> bool:
    """Whether both arms were compared, or were refused a comparison."""
    last = rows[-1]
    if last.status == NO_VERDICT:
        return True
    # A server need not report its acceptance; elsewhere a draft without any proposed nothing.
    has_drafted = last.mean_acceptance_length is not None or last.was_served
    return len(rows) > 1 and last.speedup is not None and has_drafted


def _load(rows: Sequence[LatencyRow]) -> str | None:
    """What was in flight, where that is not what was asked for."""
    known = [row for row in rows if row.mean_in_flight is not None]
    means = [f"{row.arm} {row.mean_in_flight:.1f}" for row in known]
    in_flight = f"in flight on average: {', '.join(means)}."
    if known and known[-1].offered_rate is not None:
        return f"{known[-1].offered_rate:.1f} requests/s were sent; {in_flight}"
    most_off = [abs((row.mean_in_flight or 0) / (row.batch_size or 1) - 1) for row in known]
    return in_flight.capitalize() if max(most_off, default=0) > _MOST_OFF else None


def _arms(rows: Sequence[LatencyRow]) -> Table:
    """Times of each arm."""
    last = rows[-1]
    ended_early = any(row.shortest_answer not in (None, row.max_new_tokens) for row in rows)
    lengths = [_LENGTH] if ended_early else []
    has_spread = any(row.ms_per_token_std is not None for row in rows)
    unit = "batches" if (last.batch_size or 1) > 1 and not last.was_served else "prompts"
    notes = (f"±: standard deviation over {unit}.",) if has_spread else ()
    return Table.of("arms", "", rows, (*ARM, *lengths, SPEEDUP), notes=notes)


def _divided(key: str, heading: str, parts: Sequence[Category]) -> list[Table]:
    """Speed-ups of parts of the prompts; [] for a single part, which says nothing new."""
    name = Column(heading, text=True, of="name")
    table = Table.of(key, "", parts, (name, *OF_A_PART), look="plain")
    return [table] if len(parts) > 1 else []


def headline(row: ComparedRow, num_compared: int = 1) -> Line:
    """The verdict on a speed-up, in one of four forms, with what it rests on.

    `2.31× faster`, `1.25× slower`, `cannot tell: 0.74× (0.38 to 1.56)`, `no interval: 3 prompts, 8
    needed`.

    Args:
        num_compared: see `verdict_of`.
    """
    if row.status == NO_VERDICT:
        return Line("no verdict", "warning", f"{row.error}")
    verdict = verdict_of(row, num_compared)
    speedup = verdict.speedup
    if math.isnan(speedup.estimate):
        return Line("cannot tell", "warning", verdict.reason)
    coverage = Coverage.of(speedup)
    if not speedup.has_bounds:
        text = verdict.reason
        if coverage is not None and "fewer than" in text:
            text = f"no interval: {counted(coverage.num_units, coverage.unit)}, {FEWEST_FOR_INTERVAL} needed"
        return Line(text, "strong", f"{times(speedup.estimate)} in this run")
    covers = f", over {speedup.covers}" if speedup.covers else ""
    if coverage is not None and coverage.unit == "block":
        covers += ", each with a start of both arms"
    elif coverage is not None and coverage.num_runs is None:
        # Two starts of one program differ, too.
        is_served = row.engine == "server" and not row.has_one_server
        covers += " of one start of each server" if is_served else " of one run"
    if num_compared > 1:
        covers += f", for {num_compared} pairs at once"
    if verdict.conclusion == "faster":
        bounds = speedup.bounds()
        return Line(f"{times(speedup.estimate)} faster", "good", f"95 % interval {bounds}{covers}")
    if verdict.conclusion == "slower":
        slowdown = Interval(1 / speedup.estimate, 1 / speedup.high, 1 / speedup.low)
        more = f"95 % interval {slowdown.bounds()}{covers}; speed-up {speedup:×}"
        return Line(f"{times(1 / speedup.estimate)} slower", "bad", more)
    because = verdict.reason or f"95 % interval{covers}, includes 1"
    return Line(f"cannot tell: {speedup:×}", "strong", because)


def _decode_only(row: LatencyRow) -> str | None:
    """About the speed-up after the first token, if it is outside the interval of the total."""
    decode = row.decode_speedup
    if decode is None or row.speedup is None or not row.speedup.excludes(decode.estimate):
        return None
    return (
        f"Without the time to the first token it is {decode:×}: longer answers come closer to this."
    )


def result_line(row: LatencyRow) -> str:
    """`2.31× (2.18 to 2.42)`, or the time of an arm alone; empty where nothing was measured."""
    if row.ms_per_token is None:
        return ""
    speedup = stated_speedup(row)
    return f"{row.ms_per_token:.2f} ms/token" if speedup is None else f"{speedup:×}"


def stated_speedup(row: LatencyRow) -> Interval | None:
    """The speed-up as far as the verdict lets it be stated; else None."""
    speedup: Interval = verdict_of(row).speedup
    return speedup if speedup.is_known else None


def _time(row: LatencyRow) -> str | None:
    if not row.ms_per_token:
        return None
    spread = "" if row.ms_per_token_std is None else f" ± {row.ms_per_token_std:.2f}"
    return f"{row.ms_per_token:.2f}{spread}"


def _short(milliseconds: float) -> str:
    """At most five characters for less than 100 s, so that three stay on a line."""
    return f"{milliseconds:.1f}" if milliseconds < 1000 else f"{milliseconds:.0f}"


def _percentiles(heading: str, name: str, optional: bool = False) -> Column:
    """A column with the percentiles of a time, such as `time_to_first_token`."""

    def percentiles(row: LatencyRow) -> str | None:
        values = [getattr(row, f"{name}_p{percentile}_ms") for percentile in PERCENTILES]
        if all(value is None for value in values):
            return None
        return " / ".join(UNKNOWN if value is None else _short(value) for value in values)

    return Column(f"{heading}\np50 / p99", of=percentiles, optional=optional)


# Columns about a row of `latency`. Those without an underscore are in other tables too.
SPEEDUP = Column("speed-up\n(95 % interval)", with_bounds, stated_speedup, reference=1)
ACCEPTED = Column("accepted", share, "acceptance_rate")
ARM = (
    Column("arm", text=True, of=arm_name),
    Column("ms/token", of=_time),
    Column("tokens/s", number(1), "tokens_per_second"),
    Column("first token ms", number(1), "time_to_first_token_ms"),
    Column("peak memory GB", lambda size: f"{size / 1e9:.2f}", "peak_memory_bytes", optional=True),
)
TIMES = (
    "TPOT: time per output token after the first, a mean for each request; AIPerf calls it inter-token latency."
    " ITL: time between two arrivals, each of one or more tokens; AIPerf has single events (inter-chunk latency)."
)
_LENGTH = Column("tokens\nper answer", number(1), "mean_answer_length")
REQUESTS = (
    _percentiles("first token ms", "time_to_first_token"),
    _percentiles("TPOT ms", "time_per_output_token"),
    _percentiles("ITL ms", "inter_token_latency", optional=True),
    Column("requests/s", number(), "requests_per_second"),
    Column("goodput\nrequests/s", number(), "goodput", optional=True),
    Column("tokens/s\nper user", number(1), "tokens_per_second_per_user"),
    Column("failed", of="num_failed"),
    Column("timed\nout", of="num_timed_out"),
    Column("sent\nagain", of=lambda row: row.num_sent_again or None, optional=True),
)
# Columns about a `Category`.
OF_A_PART = (
    Column("prompts", of="num_prompts"),
    Column("speed-up\n(95 % interval)", with_bounds, "speedup", optional=True),
    Column("acceptance", share, "acceptance_rate", optional=True),
    Column("tokens/iteration", number(), "tokens_per_iteration", optional=True),
)


def identical_texts(row: LatencyRow, prompts: Sequence[LatencyPromptRow]) -> str | None:
    """`14 of 15`: of the greedy texts that were compared, those that equal the regular arm's.

    Failed requests are not compared, nor are turns that follow a difference in a conversation.

    Args:
        prompts: rows of the run's prompts file. Where it is gone, all prompts count as compared.
    """
    identical = row.identical_prompts
    if identical is None:
        return None
    num_compared = identical + len(_differing(prompts)) if prompts else row.num_prompts
    return f"{identical} of {num_compared}"


def _differing(prompts: Sequence[LatencyPromptRow]) -> list[LatencyPromptRow]:
    return [prompt for prompt in prompts if prompt.divergence_position is not None]


def _compared_texts(row: LatencyRow, prompts: Sequence[LatencyPromptRow]) -> str | None:
    """A sentence about whether greedy texts of both arms are the same."""
    identical = identical_texts(row, prompts)
    if identical is None or not prompts:
        return None
    differing = _differing(prompts)
    if not differing:
        return f"Greedy output of both arms is identical token for token on {identical} prompts."
    first = min(prompt.divergence_position or 0 for prompt in differing)
    sentence = (
        f"Greedy output of both arms is identical on {identical} prompts."
        f" The earliest difference is at token {first}"
    )
    if any(prompt.logit_margin is None for prompt in differing):
        return f"{sentence}; without the model's logits it is unknown whether a tie explains it."
    widest = max(differing, key=lambda prompt: abs(prompt.logit_margin or 0.0))
    sentence += (
        f"; the largest logit margin at a difference is {abs(widest.logit_margin or 0.0):.2g}"
    )
    return f"{sentence}{explained_by_rounding(row.margin_over_rounding)}."
