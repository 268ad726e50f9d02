"""Which cost of drafting and verifying limits the speed-up, and what other K would have given.

Functions take rows of one run of `latency`: `row` is that of the speculative arm, `regular` that of
the regular one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from harness.config.acceptance_rules import tests_each_token
from harness.measuring.costs import StepCosts, costs_in_steps
from harness.measuring.rows import LatencyRow
from harness.results.statistics.interval import Interval

# Of a pass over one token. Noise below it moves a prediction by less.
_TOLERATED_NOISE = 0.2


def main_limit(tokens: float, proposed: float, costs: StepCosts, acceptable: float) -> str:
    """The limit whose removal would raise the speed-up most: `the draft is too slow: free drafting would give 2.00×`.

    Args:
        tokens: mean number of tokens that an iteration yields.
        proposed: draft tokens per iteration (K).
        acceptable: the most of them that can be accepted: of a tree, one path.
    """
    drafting = proposed * costs.draft
    ideals = {
        "the draft is too slow: free drafting": tokens / costs.verify,
        "verification costs too much: one step for all tokens": tokens
        / (drafting + min(costs.verify, 1)),
        "acceptance is too low: full acceptance": (1 + acceptable) / (drafting + costs.verify),
    }
    limit = max(ideals, key=lambda name: ideals[name])
    return f"{limit} would give {ideals[limit]:.2f}×"


def rest_ms(row: LatencyRow) -> float | None:
    """Time of an iteration beyond drafting and verifying."""
    if row.iteration_ms is None or row.draft_ms is None or row.verify_ms is None:
        return None
    return max(0.0, row.iteration_ms - row.draft_ms - row.verify_ms)


class ForK(NamedTuple):
    """A figure for proposals of at most K tokens; its interval covers acceptance alone."""

    num_draft_tokens: int
    figure: Interval


def lengths_by_k(row: LatencyRow) -> list[ForK]:
    """Tokens per iteration, had at most 1, 2, ... tokens been proposed; [] where these are not known.

    Exactly with an interval, else about and without one (`is_exact`).
    """
    exact = row.tokens_per_iteration_by_num_draft_tokens
    if exact:
        return [ForK(k, length) for k, length in enumerate(exact, start=1)]
    # Newer files have no lengths then, see `measure._smaller_k_follow`.
    if row.draft_tree not in (None, "chain") or not tests_each_token(row.rule):
        return []
    lengths = row.acceptance_length_by_num_draft_tokens or []
    if not is_exact(row):
        # Files of earlier versions have bounds, which did not hold.
        lengths = [Interval(length.estimate) for length in lengths]
    return [ForK(k, length) for k, length in enumerate(lengths, start=1)]


def is_exact(row: LatencyRow) -> bool:
    """Whether smaller K are known, from the answers themselves or as coins accept, and not only about."""
    return bool(row.tokens_per_iteration_by_num_draft_tokens) or bool(row.synthetic)


def predicted_by_k(regular: LatencyRow | None, row: LatencyRow) -> list[ForK]:
    """The speed-up predicted for every K up to the measured one; never above the tokens per iteration.

    [] where smaller K are not known, where K varied, or where costs are unknown or too noisy, as beside other programs.
    """
    measured = row.num_draft_tokens
    costs = costs_in_steps(regular, row)
    lengths = lengths_by_k(row)
    if costs is None or not isinstance(measured, int) or len(lengths) != measured:
        return []
    if row.was_starved or _passes_contradict(costs, row):
        return []
    predictions = []
    for k, length in lengths:
        # An iteration has a pass of the target, whatever noise makes of its parts.
        cost = max(1.0, k * costs.draft + _verification(row, costs.verify, k, measured))
        predictions.append(ForK(k, length.scaled(1 / cost)))
    return predictions


def _passes_contradict(costs: StepCosts, row: LatencyRow) -> bool:
    """Whether a pass over more tokens was so much faster than one over fewer that the cost of verifying fewer tokens
    is unknown.
    """
    timed = _timed_passes(row)
    if 0 not in timed or abs(costs.verify - 1) <= _TOLERATED_NOISE:
        return False
    tolerated = _TOLERATED_NOISE * timed[0]
    return any(slow - fast > tolerated for slow, fast in combinations(timed.values(), 2))


def best_of(predictions: Sequence[ForK]) -> ForK:
    """The K for which most is predicted."""
    return max(predictions, key=attrgetter("figure.estimate"))


def _timed_passes(row: LatencyRow) -> dict[int, float]:
    """Milliseconds of a pass of the target by the number of draft tokens that it verifies."""
    # The first is of one token, and so of no draft token.
    passes = enumerate(row.pass_ms_by_width or [])
    return {num_drafted: ms for num_drafted, ms in passes if ms is not None}


def _verification(row: LatencyRow, verify: float, k: int, measured: int) -> float:
    """The cost of verifying k draft tokens in target steps, between 1 and that of the `measured` ones (`verify`).

    It falls as the passes of fewer tokens are shorter, where these were timed, else in proportion to
    k. The rest, the verdict, costs the same for every k.
    """
    timed = _timed_passes(row)
    if not {0, measured} <= set(timed):
        return 1 + (verify - 1) * k / measured
    # No pass takes less time than one over fewer tokens, except by noise.
    slowest_so_far = np.maximum.accumulate(list(timed.values())) / timed[0]
    of_k, of_all = np.interp([k, measured], list(timed), slowest_so_far)
    shorter = float(of_all - of_k)
    if of_all > max(verify, 1):
        # Timed by themselves, passes seem to cost more than the whole verification.
        shorter *= (verify - 1) / float(of_all - 1)
    return verify - shorter


def share_of_predicted(row: LatencyRow) -> float | None:
    """Measured over predicted speed-up: the prediction is of decoding, without reading the prompt."""
    measured = row.speedup if row.decode_speedup is None else row.decode_speedup
    if measured is None or not row.predicted_speedup:
        return None
    return measured.estimate / row.predicted_speedup


def auto_gave_up(row: LatencyRow) -> bool:
    """Whether K=auto stopped drafting, after which too few draft tokens are left for costs."""
    return row.num_draft_tokens == "auto" and (row.mean_num_draft_tokens or 0.0) < 0.5


def held_back(regular: LatencyRow | None, row: LatencyRow) -> str | None:
    """The strongest limit of the speed-up, as `main_limit`; None where costs are unknown, as beside other programs."""
    costs = costs_in_steps(regular, row)
    if costs is None or row.predicted_speedup is None or row.was_starved:
        return None
    if auto_gave_up(row):
        return "drafting does not pay: auto gave it up"
    tokens = row.tokens_per_iteration or 1.0
    proposed = row.mean_num_draft_tokens or 0.0
    acceptable = proposed
    if row.draft_tree not in (None, "chain"):
        # Of a tree the deepest level that was ever accepted: a head may draft fewer levels than K.
        levels = enumerate(row.acceptance_histogram or [])
        acceptable = max((level for level, count in levels if count), default=proposed)
    return main_limit(tokens, proposed, costs, acceptable)
