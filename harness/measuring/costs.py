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

from harness.measuring.rows import LatencyRow


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


def iteration_steps(
    regular: LatencyRow | None, row: LatencyRow, num_draft_tokens: int, *, in_one_pass: bool
) -> float | None:
    """What an iteration of any K would cost in target steps: each token that a pass verifies adds as much as in the
    run; None where its costs are unknown.

    Args:
        in_one_pass: whether a pass of the draft proposes all tokens.
    """
    costs = costs_in_steps(regular, row)
    proposed = row.mean_num_draft_tokens
    if costs is None or proposed is None:
        return None
    verifying = 1 + num_draft_tokens * (costs.verify - 1) / proposed
    return verifying + (proposed if in_one_pass else num_draft_tokens) * costs.draft
