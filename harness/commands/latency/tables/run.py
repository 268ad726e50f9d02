"""The figures behind the answer of one run of `latency`: times of its arms, requests, acceptance and costs."""

from __future__ import annotations

from collections.abc import Sequence

from harness.commands.latency.tables.answer import has_verdict, stated_speedup
from harness.commands.latency.tables.doubts import notes
from harness.commands.latency.tables.reason import acceptance_table, times_table
from harness.measuring.figures.requests import PERCENTILES
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Column, Table, number, share, with_bounds
from harness.reporting.words import arm_name, explained_by_rounding
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from harness.results.statistics.interval import UNKNOWN

# Share by which the requests in flight may differ from `batch_size` without a line.
_MOST_OFF = 0.02


def run_tables(run: Run[LatencyRow]) -> list[Table]:
    """The figures of a run, whose regular arm is the first: times with notes, requests, acceptance, costs."""
    rows = run.rows
    tables = [_arms(run)]
    requests = [row for row in rows if row.was_served]
    if requests:
        columns = (ARM[0], *REQUESTS)
        about = (*filter(None, [_load(requests)]), TIMES)
        tables.append(Table.of("requests", "", requests, columns, notes=about))
    is_alone = len(rows) == 1 and run.last.arm == "speculative"
    if has_verdict(rows) or is_alone:
        tables.append(acceptance_table(run.last))
    return [*tables, times_table(rows[0], run.last)]


def _load(rows: Sequence[LatencyRow]) -> str | None:
    """What was in flight, where that is not what was asked for."""
    known = [row for row in rows if row.mean_in_flight is not None]
    means = [f"{row.arm} {row.mean_in_flight:.1f}" for row in known]
    in_flight = f"in flight on average: {', '.join(means)}."
    if known and known[-1].offered_rate is not None:
        return f"{known[-1].offered_rate:.1f} requests/s were sent; {in_flight}"
    most_off = [abs((row.mean_in_flight or 0) / (row.batch_size or 1) - 1) for row in known]
    return in_flight.capitalize() if max(most_off, default=0) > _MOST_OFF else None


def _arms(run: Run[LatencyRow]) -> Table:
    """Times of each arm, with what else is to be known about them."""
    rows, last = run.rows, run.last
    ended_early = any(row.shortest_answer not in (None, row.max_new_tokens) for row in rows)
    lengths = [_LENGTH] if ended_early else []
    about = [_decode_only(last), _compared_texts(last, run.prompt_rows), *notes(run)]
    if any(row.ms_per_token_std is not None for row in rows):
        unit = "batches" if (last.batch_size or 1) > 1 and not last.was_served else "prompts"
        about.insert(0, f"±: standard deviation over {unit}.")
    sentences = tuple(filter(None, about))
    return Table.of("arms", "", rows, (*ARM, *lengths, SPEEDUP), notes=sentences)


def _decode_only(row: LatencyRow) -> str | None:
    """About the speed-up after the first token, if it is outside the interval of the total."""
    decode = row.decode_speedup
    if decode is None or row.speedup is None or not row.speedup.excludes(decode.estimate):
        return None
    return (
        f"Without the time to the first token it is {decode:×}: longer answers come closer to this."
    )


def _time(row: LatencyRow) -> str | None:
    if not row.ms_per_token:
        return None
    spread = "" if row.ms_per_token_std is None else f" ± {row.ms_per_token_std:.2f}"
    return f"{row.ms_per_token:.2f}{spread}"


def _percentiles(heading: str, name: str, optional: bool = False) -> Column:
    """A column with the percentiles of a time, such as `time_to_first_token`."""

    def percentiles(row: LatencyRow) -> str | None:
        values = [getattr(row, f"{name}_p{percentile}_ms") for percentile in PERCENTILES]
        if all(value is None for value in values):
            return None
        return " / ".join(UNKNOWN if value is None else f"{value:.1f}" for value in values)

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
