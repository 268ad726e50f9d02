"""Which cost of drafting and verifying limits the speed-up, and what other K would have given.

Functions take rows of one run of `latency`: `row` is that of the speculative arm, `regular` that of
the regular one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from harness.measuring.costs import (
    ForK,
    StepCosts,
    costs_in_steps,
    iteration_steps_below,
    lengths_by_k,
)
from harness.measuring.rows import LatencyRow


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


def predicted_by_k(regular: LatencyRow | None, row: LatencyRow) -> list[ForK]:
    """The speed-up predicted for every K up to the measured one; never above the tokens per iteration.

    [] where smaller K are not known, where K varied, or where costs are unknown or too noisy, as beside other programs.
    """
    costs = costs_in_steps(regular, row)
    lengths = lengths_by_k(row)
    if costs is None or row.was_starved or len(lengths) != row.num_draft_tokens:
        return []
    steps = iteration_steps_below(row, costs)
    return [ForK(k, length.scaled(1 / steps[k])) for k, length in lengths if steps]


def best_of(predictions: Sequence[ForK]) -> ForK:
    """The K for which most is predicted."""
    return max(predictions, key=attrgetter("figure.estimate"))


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
