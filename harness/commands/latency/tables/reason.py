"""The reason for a speed-up, line by line: acceptance, the phases of an iteration, and the speed-up that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.commands.latency.tables.costs import (
    best_of,
    predicted_by_k,
    share_of_predicted,
)
from harness.config.acceptance_rules import tests_each_token
from harness.config.amounts import amount, percent
from harness.measuring.prices import costs_in_steps
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Table
from harness.results.statistics.interval import UNKNOWN, Interval
from harness.servers.dialects import how_to_report

# So many predictions for other K fit a line.
_MOST_K = 8
# The last K is still rising where it gains this much over the one before.
_RISING = 1.01


def acceptance_table(row: LatencyRow) -> Table:
    """How many draft tokens were accepted, in lines."""
    of_all = _by_position(row.marginal_acceptance_by_position, "of all iterations, as vLLM has it")
    lines = [("acceptance", _acceptance(row)), ("by position", of_all)]
    rate = row.conditional_acceptance_rate
    # Where whole blocks are verified, no token is tested by itself.
    if rate is not None and tests_each_token(row.rule):
        tested = f"{percent(rate, 1)}: tokens behind a rejection are not tested"
        by_position = _by_position(row.acceptance_by_position, "of those tested there")
        lines += [("of those tested", tested), ("by position", by_position)]
    length = row.mean_acceptance_length
    if length is not None and f"{length:.2f}" != f"{row.tokens_per_iteration or 0:.2f}":
        drafted = f"{length:.2f} tokens per iteration that drafted something, as vLLM has it"
        lines.append(("where drafted", drafted))
    return Table.of_lines("acceptance", lines, "Acceptance: accepted ÷ proposed draft tokens")


def times_table(regular: LatencyRow, row: LatencyRow) -> Table:
    """The phases of an iteration, the speed-up that follows, and other costs, in lines."""
    lines = (
        *_prediction(regular, row),
        ("by K", _by_k(regular, row)),
        ("target reads", _roof(regular.step_bytes, regular.floor_ms, regular.target_step_ms)),
        ("draft reads", _draft_reads(row)),
        ("energy", _energy(regular, row)),
        ("goodput", _goodput(regular, row)),
        ("cache", _room(regular, row)),
    )
    return Table.of_lines("reason", lines, "Where the time goes")


def _acceptance(row: LatencyRow) -> str | None:
    tokens = row.tokens_per_iteration
    parts = []
    if row.acceptance_rate is not None:
        parts.append(f"{percent(row.acceptance_rate, 1)} of the draft tokens")
    if tokens:
        length = f"{tokens:.2f} tokens per iteration, the target's own one included"
        if row.num_draft_tokens == "auto":
            length += f", K={row.mean_num_draft_tokens:.2f} on average"
        parts.append(length)
    if not parts:
        return not_reported(row) if row.is_elsewhere else None
    source = ""
    if row.acceptance_source == "metrics":
        source = ", by the server's counters"
        if row.request_rate or (row.batch_size or 1) > 1:
            source += ", of the requests that only keep up the load, too"
    return "; ".join(parts) + source


def not_reported(row: LatencyRow) -> str:
    """Why acceptance is unknown, and how to have it reported."""
    if row.drafted is False or row.is_simulated:
        return "nothing was drafted"
    advice = how_to_report(row.server) if row.engine == "server" else ""
    return "; ".join(filter(None, ["not reported by the server", advice]))


def _by_position(rates: Sequence[float | None] | None, denominator: str) -> str | None:
    """`95%  92%  94%  87%  of those tested there`."""
    if not rates:
        return None
    percentages = [UNKNOWN if rate is None else percent(rate) for rate in rates]
    return f"{'  '.join(percentages)}  {denominator}"


def _prediction(regular: LatencyRow, row: LatencyRow) -> list[tuple[str, str]]:
    """Phases of an iteration, and the speed-up that follows from them; empty where one is unknown."""
    costs = costs_in_steps(regular, row)
    share = share_of_predicted(row)
    speedup = row.decode_speedup or row.speedup
    if costs is None or share is None or speedup is None or row.iteration_ms is None:
        return []
    rest = row.iteration_ms - (row.draft_ms or 0.0) - (row.verify_ms or 0.0)
    if rest > 0:
        phases = f"= drafting {row.draft_ms:.2f} + verifying {row.verify_ms:.2f} + rest {rest:.2f}"
    else:
        # The separate pass with stopwatches was slower than the timed one: the phases add up to more.
        phases = (
            f"(in the separate pass drafting took {row.draft_ms:.2f}"
            f" and verifying {row.verify_ms:.2f})"
        )
    measured = f"measured {speedup.estimate:.2f}×"
    if row.decode_speedup:
        measured += " without the time to the first token"
    target_step = f"a target step takes {regular.target_step_ms:.2f} ms"
    predicted = (
        f"{row.tokens_per_iteration:.2f} tokens / ({row.mean_num_draft_tokens:.2f} drafted × {costs.draft:.3f}"
        f" + {costs.verify:.2f}) = {row.predicted_speedup:.2f}×; {measured}, {percent(share)} of it"
    )
    lines = [
        ("an iteration", f"{row.iteration_ms:.2f} ms {phases}; {target_step}"),
        ("predicted", predicted),
    ]
    if (row.batch_size or 1) > 1:
        lines.append(("", "(for each row alone; a batch lasts as long as its slowest row)"))
    return lines


def _energy(regular: LatencyRow, row: LatencyRow) -> str | None:
    """Joules per token of both arms, and their ratio; None where no GPU measures them."""
    if regular.joules_per_token is None or row.joules_per_token is None:
        return None
    text = f"{regular.joules_per_token:.3g} J per token regular, {row.joules_per_token:.3g} J speculative"
    if row.energy_ratio is None:
        return text
    return f"{text}: {row.energy_ratio:×} less"


def _goodput(regular: LatencyRow, row: LatencyRow) -> str | None:
    """`80% and 98% of the requests are within ...`, regular and speculative; None without `engine.slo`."""
    if row.goodput_share is None or regular.goodput_share is None:
        return None
    bounded = [f"{name} {most:g}" for name, most in (row.slo or {}).items()]
    shares = f"{percent(regular.goodput_share)} and {percent(row.goodput_share)} of the requests"
    text = f"{shares} are within {', '.join(bounded)}"
    if row.goodput_ratio is None:
        return text
    return f"{text}: {row.goodput_ratio:×} as many a second"


def _by_k(regular: LatencyRow, row: LatencyRow) -> str | None:
    """`1: 1.42 to 1.51×  2: 1.80 to 1.97×`: what this run predicts for smaller K; None where it predicts none."""
    predictions = predicted_by_k(regular, row)
    if len(predictions) < 2:
        return None
    shown = []
    for k, figure in [*predictions.items()][:_MOST_K]:
        shown.append(f"{k}: {figure.bounds() or f'{figure.estimate:.2f}'}×")
    verification = "timed by width" if row.pass_ms_by_width else "interpolated"
    limits = [f"verification {verification}"]
    if predictions[1].has_bounds:
        limits.insert(0, "95 % intervals of acceptance alone")
    return f"{'  '.join(shown)} predicted ({'; '.join(limits)}); {choice_of_k(predictions)}"


def choice_of_k(predictions: Mapping[int, Interval]) -> str:
    """What predictions for K from 1 on say: `K=2 is the best of 1 to 4`, or that none pays."""
    best, last = best_of(predictions), max(predictions)
    if predictions[best].estimate <= 1:
        return f"no K from 1 to {last} pays"
    if best == last and rises(predictions):
        return f"the speed-up still rises at K={last}"
    return f"K={best} is the best of 1 to {last}"


def rises(predictions: Mapping[int, Interval]) -> bool:
    """Whether the last K gains on the one before it."""
    last = max(predictions)
    before = predictions.get(last - 1)
    return before is not None and predictions[last].estimate > _RISING * before.estimate


def _draft_reads(row: LatencyRow) -> str | None:
    proposed = row.mean_num_draft_tokens
    step_ms = row.draft_ms / proposed if row.draft_ms and proposed else None
    return _roof(row.draft_step_bytes, row.draft_floor_ms, step_ms)


def _room(regular: LatencyRow, row: LatencyRow) -> str | None:
    """What the draft's memory costs in requests, where servers report the size of their caches."""
    without, beside = regular.cache_size, row.cache_size
    if not without or not beside or without == beside:
        return None
    fewer = 1 - beside / without
    return f"{without:,} tokens, and {beside:,} beside the draft: room for {percent(fewer, 1)} fewer requests"


def _roof(num_bytes: int | None, floor_ms: float | None, step_ms: float | None) -> str | None:
    """Bytes that a step must read, the least time for that, and how near a step comes to it."""
    if not num_bytes or not floor_ms or not step_ms:
        return None
    rate = num_bytes / floor_ms / 1e6
    in_caches = " (above 100%: caches hold much of it)" if floor_ms > step_ms else ""
    return (
        f"{amount(num_bytes)} per step: memory-bandwidth floor {floor_ms:.2f} ms ({rate:.4g} GB/s measured by a"
        f" copy); measured {step_ms:.2f} ms, {percent(floor_ms / step_ms)} of bandwidth{in_caches}"
    )
