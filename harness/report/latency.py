"""One run of `latency`: times of its arms, the speed-up with its interval, and the reason for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from harness.config.amounts import amount
from harness.menu.records import is_elsewhere
from harness.report.categories import by_category, by_turn
from harness.report.caveats import mean_answer_length, run_caveats
from harness.report.costs import (
    costs_in_steps,
    held_back,
    predicted_by_k,
    proposed_per_iteration,
    rest_ms,
    share_of_predicted,
    tokens_per_iteration,
)
from harness.report.doubts import limits_of_the_interval
from harness.report.table import (
    Column,
    Document,
    Line,
    Style,
    Table,
    interval,
    number,
    percent,
    sentences,
    times,
)
from harness.report.words import arm_name, settings_line, title
from harness.results.schema import LatencyPromptRow, LatencyRow
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, UNITS, Interval, counted
from harness.results.statistics.multiplicity import widened
from harness.results.work import why_no_verdict

# Printed in the place of an unknown figure among known ones.
_UNKNOWN = "–"
# A damaged file may hold any number.
_MOST_SPEEDUP = 1e6
# Predictions for other K in one line.
_MOST_K = 8


def latency_document(
    rows: Sequence[LatencyRow], prompts: Sequence[LatencyPromptRow] = ()
) -> Document:
    """One run in detail; empty where nothing was measured.

    Args:
        rows: of the run, the regular arm first.
        prompts: rows of its prompts file.
    """
    if all(row.ms_per_token is None for row in rows):
        return []
    last = rows[-1]
    document: list[Table | Line] = [
        Line(title(rows[0]), "strong"),
        Line(settings_line(rows), "dim"),
    ]
    lengths = [_LENGTH] if _answer_lengths_differ(rows) else []
    has_spread = any(row.ms_per_token_std is not None for row in rows)
    unit = "batches" if (last.batch_size or 1) > 1 and not was_served(last) else "prompts"
    notes = (f"±: standard deviation over {unit}.",) if has_spread else ()
    document.append(Table.of("arms", "", rows, (*ARM, *lengths, SPEEDUP), notes=notes))
    requests = [row for row in rows if was_served(row)]
    if requests:
        columns = (ARM[0], *REQUESTS)
        document.append(Table.of("requests", "", requests, columns, notes=(TIMES,)))
    no_verdict = why_no_verdict(rows)
    document += _verdict(rows, no_verdict)
    categories = by_category(prompts, last) if no_verdict is None else []
    if len(categories) > 1:
        document.append(Table.of("categories", "", categories, _CATEGORIES, look="plain"))
    turns = by_turn(prompts, last) if no_verdict is None else []
    if len(turns) > 1:
        document.append(Table.of("turns", "", turns, _TURNS, look="plain"))
    if last.identical_prompts is not None:
        document += _compared_texts(last, prompts)
    return [*document, *sentences("warning", *run_caveats(rows, prompts))]


def _verdict(rows: Sequence[LatencyRow], no_verdict: str | None) -> Document:
    """Whether speculation pays and why; or why that cannot be told."""
    regular, last = rows[0], rows[-1]
    if no_verdict is not None:
        return [Line(f"No verdict: {no_verdict}.", "warning"), _reason(regular, last)]
    told = last.mean_acceptance_length is not None or was_served(last)
    if last.speedup is not None and told:
        speedup = speedup_in_words(last)
        if no_gain := finding(last):
            sentence = f"Speculative decoding {no_gain} here: {speedup}."
        else:
            sentence = f"Speculative decoding is {speedup.replace('×', '× faster', 1)}."
        style: Style = "plain" if last.speedup_low is None else "strong"
        decode_only = sentences("plain", _decode_only(last))
        limits = sentences("dim", *limits_of_the_interval(last))
        return [Line(sentence, style), *decode_only, *limits, _reason(regular, last)]
    lines = {"target reads": _target_reads(regular), "8-bit layers": _eight_bit(regular, last)}
    table = _table_of_known(lines)
    return [table] if table.rows else []


def _decode_only(row: LatencyRow) -> str | None:
    """The speed-up after the first token, where the interval of the total does not hold it."""
    if row.decode_speedup is None or row.speedup_low is None or row.speedup_high is None:
        return None
    if row.speedup_low <= row.decode_speedup <= row.speedup_high:
        return None
    certainty = _in_brackets(row.decode_speedup_low, row.decode_speedup_high)
    return (
        f"Without the time to the first token it is {row.decode_speedup:.2f}×{certainty}:"
        " longer answers come closer to this."
    )


def was_served(row: LatencyRow) -> bool:
    """Whether prompts were requests, each with a time of its own."""
    return row.requests_per_second is not None


def _answer_lengths_differ(rows: Sequence[LatencyRow]) -> bool:
    """Whether any answer has fewer tokens than were asked for."""
    known = [row for row in rows if row.shortest_answer is not None]
    return any(row.shortest_answer != row.max_new_tokens for row in known)


def result_line(row: LatencyRow) -> str:
    """`2.31× (2.18 to 2.42)`, or the time of an arm alone; empty where nothing was measured."""
    if row.ms_per_token is None:
        return ""
    if not row.speedup:
        return f"{row.ms_per_token:.2f} ms/token"
    bounds = speedup_bounds(row)
    return f"{times(row.speedup)} ({bounds})" if bounds else times(row.speedup)


def speedup_bounds(row: LatencyRow, num_compared: int = 1) -> str | None:
    """`2.18 to 2.42`; None where there is no interval.

    Args:
        num_compared: pairs whose intervals are to hold all at once.
    """
    bounds = interval_at_once(row, num_compared)
    return None if math.isnan(bounds.low) else interval(bounds.low, bounds.high)


def interval_at_once(row: LatencyRow, num_compared: int) -> Interval:
    """The interval of a speed-up, so wide that it holds together with the others compared."""
    if row.speedup is None or row.speedup_low is None or row.speedup_high is None:
        return Interval()
    own = Interval(row.speedup, row.speedup_low, row.speedup_high)
    if num_compared == 1:
        return own
    ends = (own.low, own.estimate, own.high)
    if not 0 < min(ends) <= max(ends) < _MOST_SPEEDUP:
        return Interval()
    return widened(own, num_compared, _degrees_of_freedom(row))


def _degrees_of_freedom(row: LatencyRow) -> int:
    """Those of the scarcest unit that the interval covers: `15 prompts and 5 runs` leave 4."""
    words = (row.speedup_covers or "").split()
    numbers = [
        int(number)
        for number, name in itertools.pairwise(words)
        if number.isdecimal() and not name.startswith("seed")
    ]
    return min(numbers, default=row.num_prompts or 0) - 1


def speedup_in_words(row: LatencyRow, num_compared: int = 1) -> str:
    """`2.31× (95 % interval 2.18 to 2.42 over 15 prompts)`; see `speedup_bounds`."""
    bounds = speedup_bounds(row, num_compared)
    covers = f" over {row.speedup_covers}" if row.speedup_covers else ""
    together = f", for {num_compared} pairs at once" if num_compared > 1 else ""
    certainty = f"95 % interval {bounds}{covers}{together}" if bounds else no_interval(row)
    return f"{row.speedup:.2f}× ({certainty})"


def _in_brackets(low: float | None, high: float | None, *about: str) -> str:
    """` (about, 95 % interval 2.18 to 2.42)`, to follow a figure; as much of it as is known."""
    bounds = interval(low, high)
    parts = [*about, f"95 % interval {bounds}"] if bounds else about
    return f" ({', '.join(parts)})" if parts else ""


def no_interval(row: LatencyRow) -> str:
    """`no interval from fewer than 8 prompts`."""
    if row.repeat == "all" and not row.speedup_covers:
        return "no interval: the times of each prompt, latency_prompts.csv of every run, are gone"
    unit = "batch" if (row.batch_size or 1) > 1 else "prompt"
    if row.speedup_covers:
        # `3 laps`, `1 batch`.
        unit = next(name for name in UNITS if name in row.speedup_covers)
    return f"no interval from fewer than {counted(FEWEST_FOR_INTERVAL, unit)}"


def finding(row: LatencyRow) -> str | None:
    """`does not pay`, or that there is no significant difference; None for a pair that gains."""
    low, high = row.speedup_low, row.speedup_high
    if low is not None and high is not None and low <= 1 <= high:
        return "makes no significant difference"
    return None if (row.speedup or 0) > 1 else "does not pay"


def _time(row: LatencyRow) -> str | None:
    if not row.ms_per_token:
        return None
    spread = "" if row.ms_per_token_std is None else f" ± {row.ms_per_token_std:.2f}"
    return f"{row.ms_per_token:.2f}{spread}"


def _percentiles(heading: str, name: str, optional: bool = False) -> Column:
    """A column with three percentiles of a time, such as `time_to_first_token`."""

    def percentiles(row: LatencyRow) -> str | None:
        values = [getattr(row, f"{name}_p{percentile}_ms") for percentile in (50, 90, 99)]
        if all(value is None for value in values):
            return None
        return " / ".join(_UNKNOWN if value is None else f"{value:.1f}" for value in values)

    return Column(f"{heading}\np50 / p90 / p99", of=percentiles, optional=optional)


# Columns about a row, which other tables have as well.
SPEEDUP = Column("speed-up", times, "speedup")
BOUNDS = Column("95 %\ninterval", of=speedup_bounds)
ACCEPTED = Column("accepted", percent, "acceptance_rate")
ARM = (
    Column("arm", text=True, of=arm_name),
    Column("ms/token", of=_time),
    Column("tokens/s", number(1), "tokens_per_second"),
    Column("first token ms", number(1), "time_to_first_token_ms"),
    Column("peak memory GB", lambda size: f"{size / 1e9:.2f}", "peak_memory_bytes", optional=True),
)
TIMES = (
    "TPOT: time per output token after the first, a mean for each request; AIPerf calls it inter-token latency."
    " ITL: time between two arrivals, each of one or more tokens; AIPerf calls it inter-chunk latency."
)
_LENGTH = Column("tokens\nper answer", number(1), mean_answer_length)
REQUESTS = (
    _percentiles("first token ms", "time_to_first_token"),
    _percentiles("TPOT ms", "time_per_output_token"),
    _percentiles("ITL ms", "inter_token_latency", optional=True),
    Column("requests/s", number(), "requests_per_second"),
    Column("goodput\nrequests/s", number(), "goodput", optional=True),
    Column("tokens/s\nin all", number(1), "tokens_per_second"),
    Column("tokens/s\nper user", number(1), "tokens_per_second_per_user"),
    Column("failed", of="num_failed"),
    Column("timed\nout", of="num_timed_out"),
    Column("sent\nagain", of=lambda row: row.num_sent_again or None, optional=True),
)
_CATEGORIES = (
    Column("category", text=True, of="name"),
    Column("prompts", of="num_prompts"),
    Column("speed-up", times, "speedup.estimate"),
    Column("acceptance", percent, "acceptance_rate"),
    Column("tokens/iteration", number(), "mean_acceptance_length"),
)

_TURNS = (Column("turn", text=True, of="name"), *_CATEGORIES[1:])


def _reason(regular: LatencyRow, row: LatencyRow) -> Table:
    """Acceptance, costs and prediction, one per line."""
    loses = (row.speedup or 1) < 1
    lines = {
        "acceptance": _acceptance(row),
        "by position": _by_position(row.acceptance_by_position, "of those tested there"),
        "": _by_position(row.marginal_acceptance_by_position, "of all iterations, as vLLM has it"),
        "accepted": _histogram(row.acceptance_histogram or []),
        "target reads": _target_reads(regular),
        "draft reads": _draft_reads(row),
        "8-bit layers": _eight_bit(regular, row),
        "identical arms": _identical_arms(row),
        **_prediction(regular, row),
        "energy": _energy(regular, row),
        "goodput": _goodput(regular, row),
        "by K": _by_k(regular, row),
        "why": held_back(regular, row) if loses else None,
    }
    return _table_of_known(lines)


def _table_of_known(lines: dict[str, str | None]) -> Table:
    known = [(name, text) for name, text in lines.items() if text]
    return Table.of_lines("reason", known)


def _acceptance(row: LatencyRow) -> str | None:
    tokens = tokens_per_iteration(row)
    parts = []
    if row.acceptance_rate is not None:
        share = f"{row.acceptance_rate:.1%} of the draft tokens"
        tested = row.conditional_acceptance_rate
        parts.append(share if tested is None else f"{share} ({tested:.1%} of those tested)")
    if tokens:
        length = f"{tokens:.2f} tokens per iteration"
        if row.num_draft_tokens == "auto":
            length += f", K={proposed_per_iteration(row):.2f} on average"
        parts.append(length)
    if not parts:
        return _not_reported(row) if is_elsewhere(row.engine) else None
    source = ", by the server's counters" if row.acceptance_source == "metrics" else ""
    return "; ".join(parts) + source


def _not_reported(row: LatencyRow) -> str:
    may_be_vllm = row.server is None or "vLLM" in row.server
    flag = "--per-request-spec-decode-metrics detailed"
    advice = f"; vLLM reports it when started with {flag}" if may_be_vllm else ""
    return f"not reported by the server{advice}"


def _by_position(rates: Sequence[float | None] | None, denominator: str) -> str | None:
    """`95%  92%  94%  87%  of those tested there`."""
    if not rates:
        return None
    percentages = [_UNKNOWN if rate is None else f"{rate:.0%}" for rate in rates]
    return f"{'  '.join(percentages)}  {denominator}"


def _histogram(histogram: Sequence[int]) -> str | None:
    """`0: 25%  1: 75%  of 4 iterations`."""
    total = sum(histogram)
    if not total:
        return None
    shares = [f"{count}: {how_often / total:.0%}" for count, how_often in enumerate(histogram)]
    return "  ".join([*shares, f"of {total} iterations"])


def _prediction(regular: LatencyRow, row: LatencyRow) -> dict[str, str]:
    """Phases of an iteration, and the speed-up that follows from them; empty where one is unknown."""
    costs = costs_in_steps(regular, row)
    rest = rest_ms(row)
    share = share_of_predicted(row)
    if costs is None or rest is None or share is None:
        return {}
    if rest:
        phases = f"= drafting {row.draft_ms:.2f} + verifying {row.verify_ms:.2f} + rest {rest:.2f}"
    else:
        # The separate pass with stopwatches was slower than the timed one: the phases add up to more.
        phases = (
            f"(in the separate pass drafting took {row.draft_ms:.2f}"
            f" and verifying {row.verify_ms:.2f})"
        )
    lines = {
        "an iteration": (
            f"{row.iteration_ms:.2f} ms {phases}; a target step takes {regular.target_step_ms:.2f} ms"
        ),
        "predicted": (
            f"{tokens_per_iteration(row):.2f} / ({proposed_per_iteration(row):.2f} × {costs.draft:.3f}"
            f" + {costs.verify:.2f}) = {row.predicted_speedup:.2f}×; measured is {share:.0%} of it"
        ),
    }
    if (row.batch_size or 1) > 1:
        lines[""] = "(for each row alone; a batch lasts as long as its slowest row)"
    return lines


def _energy(regular: LatencyRow, row: LatencyRow) -> str | None:
    """Joules per token of both arms, and their ratio; None where no GPU tells."""
    if regular.joules_per_token is None or row.joules_per_token is None:
        return None
    text = f"{regular.joules_per_token:.3g} J per token regular, {row.joules_per_token:.3g} J speculative"
    if row.energy_ratio is None:
        return text
    certainty = _in_brackets(row.energy_ratio_low, row.energy_ratio_high)
    return f"{text}: {row.energy_ratio:.2f}× less{certainty}"


def _goodput(regular: LatencyRow, row: LatencyRow) -> str | None:
    """`80% of the regular requests and 98% of the speculative ones ...`; None without `engine.slo`."""
    if row.goodput_share is None or regular.goodput_share is None:
        return None
    bounded = [f"{name} {most:g}" for name, most in (row.slo or {}).items()]
    shares = f"{regular.goodput_share:.0%} and {row.goodput_share:.0%} of the requests"
    text = f"{shares} are within {', '.join(bounded)}"
    if row.goodput_ratio is None:
        return text
    certainty = _in_brackets(row.goodput_ratio_low, row.goodput_ratio_high)
    return f"{text}: {row.goodput_ratio:.2f}× as many a second{certainty}"


def _by_k(regular: LatencyRow, row: LatencyRow) -> str | None:
    """`1: 1.42 to 1.51×  2: 1.80 to 1.97×`: what this run predicts for smaller K; None where it predicts none."""
    predictions = predicted_by_k(regular, row)
    if len(predictions) < 2:
        return None
    shown = []
    for one in predictions[:_MOST_K]:
        bounds = interval(one.low, one.high)
        shown.append(f"{one.num_draft_tokens}: {bounds or f'{one.speedup:.2f}'}×")
    best = max(predictions, key=lambda one: one.speedup)
    largest = " or a larger one" if best is predictions[-1] else ""
    covers = "95 % intervals of acceptance alone; " if predictions[0].low is not None else ""
    verification = "timed by width" if row.pass_ms_by_width else "interpolated"
    return (
        f"{'  '.join(shown)} predicted ({covers}verification {verification});"
        f" the best is K={best.num_draft_tokens}{largest}"
    )


def _target_reads(regular: LatencyRow) -> str | None:
    return _roof(regular.step_bytes, regular.floor_ms, regular.target_step_ms)


def _draft_reads(row: LatencyRow) -> str | None:
    proposed = proposed_per_iteration(row)
    step_ms = row.draft_ms / proposed if row.draft_ms and proposed else None
    return _roof(row.draft_step_bytes, row.draft_floor_ms, step_ms)


def _identical_arms(row: LatencyRow) -> str | None:
    """How far apart an arm is from itself; None where that was not measured."""
    if row.aa_ratio is None:
        return None
    about = _in_brackets(row.aa_ratio_low, row.aa_ratio_high, "the regular arm over itself")
    return f"{row.aa_ratio:.2f}×{about}"


def _roof(num_bytes: int | None, floor_ms: float | None, step_ms: float | None) -> str | None:
    """Bytes that a step must read, the least time for that, and how near a step comes to it."""
    if not num_bytes or not floor_ms or not step_ms:
        return None
    rate = num_bytes / floor_ms / 1e6
    in_caches = " (above 100%: caches hold much of it)" if floor_ms > step_ms else ""
    return (
        f"{amount(num_bytes)} per step, which takes at least {floor_ms:.2f} ms at {rate:.4g} GB/s, the rate of a"
        f" large copy here; a step takes {step_ms:.2f} ms, {floor_ms / step_ms:.0%} of that rate{in_caches}"
    )


def _eight_bit(regular: LatencyRow, row: LatencyRow) -> str | None:
    """Share of the time that 8-bit layers take, and a faster alternative; None without any."""
    shares = []
    if regular.target_8bit_share is not None:
        shares.append(f"{regular.target_8bit_share:.0%} of a target step")
    if row.draft_8bit_share is not None:
        shares.append(f"{row.draft_8bit_share:.0%} of drafting")
    if not shares:
        return None
    # Only a GPU has memory of its own. There these layers wait for the host.
    on_gpu = bool(regular.peak_memory_bytes)
    advice = "; they wait for the host, and quantization=4bit is usually faster" if on_gpu else ""
    return f"take {' and '.join(shares)}{advice}"


def _compared_texts(row: LatencyRow, prompts: Sequence[LatencyPromptRow]) -> Document:
    """Whether greedy texts of both arms are the same, over the prompts that both finished."""
    failed = {prompt.prompt_index for prompt in prompts if prompt.error}
    of_arm = [prompt for prompt in prompts if prompt.arm == row.arm]
    compared = [prompt for prompt in of_arm if prompt.prompt_index not in failed]
    return [Line(_identity(compared))] if compared else []


def _identity(prompts: Sequence[LatencyPromptRow]) -> str:
    differing = [prompt for prompt in prompts if prompt.divergence_position is not None]
    identical = f"{len(prompts) - len(differing)} of {len(prompts)}"
    if not differing:
        return f"Greedy output of both arms is identical token for token on {identical} prompts."
    first = min(prompt.divergence_position or 0 for prompt in differing)
    sentence = (
        f"Greedy output of both arms is identical on {identical} prompts."
        f" The earliest difference is at token {first}"
    )
    margins = [prompt.logit_margin for prompt in differing]
    known = [abs(margin) for margin in margins if margin is not None]
    if len(known) < len(margins):
        return f"{sentence}; without the model's logits it is unknown whether a tie explains it."
    return (
        f"{sentence}; the largest logit margin at a difference is {max(known):.2g}"
        " (near 0: a tie that rounding broke differently)."
    )
