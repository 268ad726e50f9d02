"""The time of an iteration, of engines that report no phases too: next to a regular step in one run, and over the K of
a sweep as a fixed part and one per draft token. It shows whether a draft is bad, or whether a server does not batch
verification.

Times are without the first token: ms per token × tokens per iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.commands.latency.tables.doubts import mean_answer_length
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.results.prompt_times import Unit, rows_by_unit
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage, Interval
from harness.results.statistics.lines import FittedLine, line_of_ratios

# Shares of a regular step: below the first a draft token costs little, above the second as much as decoding it.
_CHEAP = 0.1
_EXPENSIVE = 0.5
# Drafts that cost nothing, by the beginnings of their names here and in servers. They do not draft in every iteration.
_FREE = ("ngram", "lookup", "suffix")


def share_of_iteration(regular: LatencyRow, row: LatencyRow) -> float | None:
    """A regular step as a share of an iteration's time; None where one of them is unknown."""
    step_ms = _step_ms(regular)
    iteration_ms = _iteration_ms(row)
    if not step_ms or not iteration_ms:
        return None
    return step_ms / iteration_ms


def iteration_line(runs: Sequence[Run[LatencyRow]]) -> str | None:
    """`An iteration takes 21.4 ms (20.9 to 22.0) + 3.10 ms (2.80 to 3.40) per draft token ...`, and what follows.

    Args:
        runs: of one pair with several K.

    Returns:
        None where fewer than two K have a time.
    """
    known = [run for run in runs if _step_ms(run.rows[0]) and _iteration_ms(run.last)]
    # Draft tokens of an iteration: K, less at the end of an answer and where a draft is not sure enough.
    drafted = []
    for run in known:
        k = run.last.num_draft_tokens
        drafted.append(run.last.mean_num_draft_tokens or (k if isinstance(k, int) else 0))
    if len(set(drafted)) < 2:
        return None
    step_ms = float(np.mean([_step_ms(run.rows[0]) for run in known]))
    fitted = _fitted(known, drafted)
    slope = fitted.slope
    unit = f" (95 % intervals over {slope.covers})" if slope.has_bounds else ""
    costs = f"{_ms(fitted.intercept)} + {_ms(slope)} per draft token{unit}"
    if slope.estimate <= 0:
        most = (
            f", at most {_ms(Interval(slope.high))}" if slope.has_bounds and slope.high > 0 else ""
        )
        costs = f"{_ms(fitted.intercept)}, and no measurable time per draft token{most}{unit}"
    row = known[0].last
    follows = _what_follows(slope.scaled(1 / step_ms), row)
    step = f"a regular step takes {_ms(Interval(step_ms))}"
    return f"An iteration takes {costs}; {step}: {follows}."


def _what_follows(share: Interval, row: LatencyRow) -> str:
    """What a draft token's cost means.

    Args:
        share: that cost as a share of a regular step.
    """
    low, high = (share.low, share.high) if share.has_bounds else (share.estimate, share.estimate)
    if low < _CHEAP and high >= _EXPENSIVE:
        return "too imprecise to say what a draft token costs"
    if high < _CHEAP:
        return "the draft is cheap, and a larger K pays while its tokens are accepted"
    cost = f"{share.estimate:.0%} of a regular step".replace("%", " %")
    if low < _EXPENSIVE:
        return f"a draft token costs {cost}, and pays only if it is accepted more often than that"
    place = "this server" if row.is_elsewhere else "this target"
    if _is_free(row):
        return f"each verified token costs {cost}: {place} does not batch verification"
    return (
        f"each draft token costs {cost}: the draft is slow, or {place} does not batch verification"
    )


def _fitted(runs: Sequence[Run[LatencyRow]], drafted: Sequence[float]) -> FittedLine:
    """The line, with intervals where the runs' prompt files have the same units."""
    by_unit = [_by_unit(run.last, run.prompt_rows) for run in runs]
    common = sorted(set.intersection(*map(set, by_unit)))
    times = np.array([[_iteration_ms(run.last)] for run in runs], float)
    iterations = np.ones_like(times)
    if len(common) >= FEWEST_FOR_INTERVAL:
        both = np.array([[of_run[unit] for unit in common] for of_run in by_unit])
        times, iterations = both[..., 0], both[..., 1]
    coverage = Coverage.of(runs[0].last.speedup)
    return line_of_ratios(drafted, times, iterations, coverage.unit if coverage else "prompt")


def _by_unit(
    row: LatencyRow, prompts: Sequence[LatencyPromptRow]
) -> dict[Unit, tuple[float, float]]:
    """Milliseconds after the first token, and iterations, of each unit of the speculative arm.

    Of a server that reports no iterations, those that its tokens took at the run's mean.
    """
    per_iteration = row.tokens_per_iteration or 1.0
    units = {}
    for unit, rows in rows_by_unit(prompts, "speculative").items():
        times = [(one.time_ms or 0.0) - (one.time_to_first_token_ms or 0.0) for one in rows]
        iterations = []
        for one in rows:
            num_decoded = (one.num_tokens or 0) - (one.time_to_first_token_ms is not None)
            number = one.num_iterations or num_decoded / per_iteration
            if number:
                iterations.append(number)
        if len(iterations) == len(rows):
            units[unit] = (sum(times), sum(iterations))
    return units


def _iteration_ms(row: LatencyRow) -> float | None:
    """The time of an iteration; None where it is unknown."""
    ms_per_token = _ms_per_token(row)
    tokens = row.tokens_per_iteration
    if ms_per_token is None or tokens is None or row.draft_tree == "dynamic":
        return None
    return ms_per_token * tokens


def _step_ms(regular: LatencyRow) -> float | None:
    """The time of a regular step; None where it is unknown, and of a first command, which may draft too."""
    is_regular = regular.arm == "regular" and regular.draft != SECOND_COMMAND
    return _ms_per_token(regular) if is_regular and not regular.drafted else None


def _ms_per_token(row: LatencyRow) -> float | None:
    """Milliseconds per token after the first, over all answers; None where rows of a batch wait for each other."""
    if row.ms_per_token is None or ((row.batch_size or 1) > 1 and not row.was_served):
        return None
    length = mean_answer_length(row)
    first_ms = row.time_to_first_token_ms
    if length is None or first_ms is None or length <= 1:
        return row.ms_per_token
    return (row.ms_per_token * length - first_ms) / (length - 1)


def _is_free(row: LatencyRow) -> bool:
    names = (row.draft or "", row.draft_method or "")
    return any(name.startswith(_FREE) for name in names)


def _ms(time: Interval) -> str:
    """`21.4 ms (20.9 to 22.0)`."""
    digits = 1 if abs(time.estimate) >= 10 else 2
    bounds = f" ({time.low:.{digits}f} to {time.high:.{digits}f})" if time.has_bounds else ""
    return f"{time.estimate:.{digits}f} ms{bounds}"
