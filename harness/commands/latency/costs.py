"""The cost of an iteration in regular steps, and which part of it limits the speed-up.

Throughout, `row` is the row of the speculative arm and `regular` that of the regular arm of the same run.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.results.runs import Run

# An iteration includes a pass of the target, so it should take at least one regular step. Measured times vary by a few
# per cent between starts of the same program, and by more on a busy machine. So an iteration is taken for wrongly
# measured only if it takes less than this many regular steps.
_LEAST_STEPS = 0.8
# A draft that proposes fewer tokens per iteration than this gives a speed-up below 1.25 even if all of these tokens are
# accepted and cost nothing.
_SELDOM = 0.25


class StepCosts(NamedTuple):
    """Costs in regular steps: `draft` (c) for one draft token, `verify` (v) for verifying a whole proposal."""

    draft: float
    verify: float


def costs_in_steps(regular: LatencyRow | None, row: LatencyRow) -> StepCosts | None:
    """The costs c and v, as Leviathan et al. 2023 define them, from the times of the phases; None if one is unknown, if
    nothing was proposed, or if processes waited for a core: the times then include waiting.
    """
    if regular is None or row.draft_ms is None or row.verify_ms is None or row.was_starved:
        return None
    step_ms = regular.target_step_ms
    proposed = row.mean_num_draft_tokens
    if not step_ms or not proposed:
        return None
    # `draft_ms` and `verify_ms` are times per iteration.
    return StepCosts(row.draft_ms / proposed / step_ms, row.verify_ms / step_ms)


def main_limit(tokens: float, proposed: float, costs: StepCosts) -> str:
    """The limit whose removal would raise the speed-up most: `the draft is too slow: free drafting would give 2.00×`.

    The speed-up is the tokens of an iteration over its cost in regular steps: tokens / (proposed c + v). It is
    computed three times: with c = 0, with v at most 1, and with every draft token accepted.

    Args:
        tokens: mean number of tokens that an iteration yields.
        proposed: mean number of draft tokens per iteration.
        costs: c and v.
    """
    drafting = proposed * costs.draft
    ideals = {
        "the draft is too slow: free drafting": tokens / costs.verify,
        "verification costs too much: one step for all tokens": tokens
        / (drafting + min(costs.verify, 1)),
        "acceptance is too low: full acceptance": (1 + proposed) / (drafting + costs.verify),
    }
    limit = max(ideals, key=lambda name: ideals[name])
    return f"{limit} would give {ideals[limit]:.2f}×"


def share_of_predicted(row: LatencyRow) -> float | None:
    """The measured speed-up (the decode-only one, if it was measured) divided by the predicted one; None if either is
    unknown.
    """
    measured = row.speedup if row.decode_speedup is None else row.decode_speedup
    if measured is None or not row.predicted_speedup:
        return None
    return measured.estimate / row.predicted_speedup


def strongest_limit(regular: LatencyRow | None, row: LatencyRow) -> str | None:
    """The strongest limit of the speed-up, in the words of `main_limit`, or that the draft seldom proposes.

    None if a cost or the predicted speed-up is unknown.
    """
    costs = costs_in_steps(regular, row)
    # Without a predicted speed-up, a cost may be 0, by which `main_limit` would divide.
    if costs is None or row.predicted_speedup is None:
        return None
    tokens = row.tokens_per_iteration or 1.0
    proposed = row.mean_num_draft_tokens or 0.0
    if proposed < _SELDOM:
        return f"the draft seldom proposes: {proposed:.2f} tokens per iteration"
    return main_limit(tokens, proposed, costs)


def share_of_iteration(run: Run[LatencyRow]) -> float | None:
    """A regular step's time as a share of an iteration's time, for servers, which do not time drafting and verifying.

    Both are computed from the time per token after the first token. None if either time is unknown, if the share is
    impossible, if processes waited for a core, if the run has no speculative arm, or if the regular arm drafts or may
    draft: with two commands, the first one may.
    """
    regular, row = run.row("regular"), run.last
    if regular is None or regular.drafted or regular.draft == SECOND_COMMAND:
        return None
    if row.was_starved or not row.was_served:
        return None
    step_ms = regular.ms_per_token_after_first
    ms_per_token, tokens = row.ms_per_token_after_first, row.tokens_per_iteration
    if row.arm != "speculative" or not (step_ms and ms_per_token and tokens):
        return None
    # 10 ms for a regular step, and 5 ms per token at 3 tokens per iteration, give a share of 10 / 15.
    share = step_ms / (ms_per_token * tokens)
    return share if 0 < share <= 1 / _LEAST_STEPS else None
