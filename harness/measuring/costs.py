"""What an iteration yields and costs, from the rows of a run, in target steps.

An iteration drafts K tokens at c target steps each, verifies them in v target steps, and yields
some tokens: speed-up = tokens / (K c + v), by Leviathan et al. 2023. With K = 4, c = 0.1 and v =
1.1, an iteration that yields 3 tokens takes 1.5 target steps, in which regular decoding yields 1.5
tokens: the speed-up is 2.

Functions take rows of one run of `latency`: `row` is that of the speculative arm, `regular` that of
the regular one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from harness.config.acceptance_rules import tests_each_token
from harness.measuring.rows import LatencyRow
from harness.results.statistics.interval import Interval

# Of a pass over one token. Noise below it moves a prediction by less.
_TOLERATED_NOISE = 0.2


@dataclass(frozen=True)
class StepCosts:
    """Times in target steps: of one draft step (c), and of one verification of all K tokens (v)."""

    draft: float
    verify: float


def costs_in_steps(regular: LatencyRow | None, row: LatencyRow) -> StepCosts | None:
    """Measured costs; None where one of them is unknown."""
    if regular is None or row.draft_ms is None or row.verify_ms is None:
        return None
    step_ms = regular.target_step_ms
    proposed = row.mean_num_draft_tokens
    if not step_ms or not proposed:
        return None
    # Both times are of a whole iteration.
    return StepCosts(row.draft_ms / proposed / step_ms, row.verify_ms / step_ms)


def iteration_steps_below(
    row: LatencyRow, costs: StepCosts, *, in_one_pass: bool = False
) -> dict[int, float]:
    """What an iteration costs in target steps at each K up to that of a run.

    {} where K varied, and where the times of passes are too noisy.

    Args:
        in_one_pass: whether a pass of the draft proposes all tokens.
    """
    measured = row.num_draft_tokens
    if not isinstance(measured, int) or _passes_contradict(costs, row):
        return {}
    steps = {}
    for k in range(1, measured + 1):
        drafting = (measured if in_one_pass else k) * costs.draft
        # An iteration has a pass of the target, whatever noise makes of its parts.
        steps[k] = max(1.0, drafting + _verification(row, costs.verify, k, measured))
    return steps


def steps_per_token(
    row: LatencyRow, costs: StepCosts, *, in_one_pass: bool = False
) -> dict[int, float]:
    """The same where each token that a pass verifies adds as much as in the run: of drafts that often propose fewer
    than K, and where passes were not timed by width.
    """
    measured = row.num_draft_tokens
    proposed = row.mean_num_draft_tokens
    if not isinstance(measured, int) or not proposed:
        return {}
    steps = {}
    for k in range(1, measured + 1):
        verifying = 1 + k * (costs.verify - 1) / proposed
        steps[k] = max(1.0, verifying + (proposed if in_one_pass else k) * costs.draft)
    return steps


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


def _passes_contradict(costs: StepCosts, row: LatencyRow) -> bool:
    """Whether a pass over more tokens was so much faster than one over fewer that the cost of verifying fewer tokens
    is unknown.
    """
    timed = _timed_passes(row)
    if 0 not in timed or abs(costs.verify - 1) <= _TOLERATED_NOISE:
        return False
    tolerated = _TOLERATED_NOISE * timed[0]
    return any(slow - fast > tolerated for slow, fast in combinations(timed.values(), 2))


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
