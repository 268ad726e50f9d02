"""The reason for a speed-up, line by line: acceptance, the phases of an iteration, and the speed-up that follows."""

from __future__ import annotations

from collections.abc import Mapping

from harness.commands.latency.tables.costs import (
    best_of,
    predicted_by_k,
)
from harness.config.amounts import amount, percent
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Table
from harness.results.statistics.interval import Interval

# So many predictions for other K fit a line.
_MOST_K = 8
# The last K is still rising where it gains this much over the one before.
_RISING = 1.01


def times_table(regular: LatencyRow, row: LatencyRow) -> Table:
    """The phases of an iteration, what follows for other K, and other costs, in lines."""
    lines = (
        ("an iteration", _phases(regular, row)),
        ("by K", _by_k(regular, row)),
        ("target reads", _roof(regular.step_bytes, regular.floor_ms, regular.target_step_ms)),
        ("draft reads", _draft_reads(row)),
    )
    return Table.of_lines("reason", lines, "Where the time goes")


def _phases(regular: LatencyRow, row: LatencyRow) -> str | None:
    """The phases of an iteration, which a separate pass with stopwatches may have timed; None where one is unknown."""
    known = (row.iteration_ms, row.draft_ms, row.verify_ms, regular.target_step_ms)
    if None in known:
        return None
    total, drafting, verifying, step = (f"{ms:.2f}" for ms in known)
    phases = f"{total} ms, of which drafting {drafting} and verifying {verifying}"
    batch = "; of a row, and a batch lasts as long as its slowest"
    return f"{phases}; a target step {step} ms{batch if (row.batch_size or 1) > 1 else ''}"


def _by_k(regular: LatencyRow, row: LatencyRow) -> str | None:
    """`1: 1.42 to 1.51×  2: 1.80 to 1.97×`: what this run predicts for smaller K; None where it predicts none."""
    predictions = predicted_by_k(regular, row)
    if len(predictions) < 2:
        return None
    shown = []
    for k, figure in [*predictions.items()][:_MOST_K]:
        shown.append(f"{k}: {figure.bounds() or f'{figure.estimate:.2f}'}×")
    shown_k = "  ".join(shown)
    return f"{shown_k} predicted (intervals are of acceptance alone); {choice_of_k(predictions)}"


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
