"""The price of an iteration in regular steps, and which part of it limits the speed-up.

Of rows of one run of `latency`, `row` is that of the speculative arm, `regular` that of the regular one.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.config.model_names import SECOND_COMMAND
from harness.measuring.rows import LatencyRow
from harness.results.prompt_times import pairs_of, wait_for
from harness.results.rows.prompts import drafts_of
from harness.results.runs import Run

# An iteration has a pass of the target, so that it takes a regular step at least. Starts of one program differ by some
# per cent, and times on a busy machine by more: what is further below was not measured right.
_LEAST_STEPS = 0.8
# A draft that proposes fewer tokens per iteration could gain little if all were accepted, free of cost.
_SELDOM = 0.25


class StepCosts(NamedTuple):
    """Times in regular steps: of drafting one token (c), and of verifying all K (v)."""

    draft: float
    verify: float


def costs_in_steps(regular: LatencyRow | None, row: LatencyRow) -> StepCosts | None:
    """Costs by the phases of an iteration, as Leviathan et al. 2023 have them; None where one of them is unknown."""
    if regular is None or row.draft_ms is None or row.verify_ms is None:
        return None
    step_ms = regular.target_step_ms
    proposed = row.mean_num_draft_tokens
    if not step_ms or not proposed:
        return None
    # Both times are of a whole iteration.
    return StepCosts(row.draft_ms / proposed / step_ms, row.verify_ms / step_ms)


def main_limit(
    tokens: float, proposed: float, costs: StepCosts, slow_drafting: str = "the draft is too slow"
) -> str:
    """The limit whose removal would raise the speed-up most: `the draft is too slow: free drafting would give 2.00×`.

    Args:
        tokens: mean number of tokens that an iteration yields.
        proposed: draft tokens per iteration (K).
        slow_drafting: why drafting takes the time that it does.
    """
    drafting = proposed * costs.draft
    ideals = {
        f"{slow_drafting}: free drafting": tokens / costs.verify,
        "verification costs too much: one step for all tokens": tokens
        / (drafting + min(costs.verify, 1)),
        "acceptance is too low: full acceptance": (1 + proposed) / (drafting + costs.verify),
    }
    limit = max(ideals, key=lambda name: ideals[name])
    return f"{limit} would give {ideals[limit]:.2f}×"


def share_of_predicted(row: LatencyRow) -> float | None:
    """Measured over predicted speed-up: the prediction is of decoding, without reading the prompt."""
    measured = row.speedup if row.decode_speedup is None else row.decode_speedup
    if measured is None or not row.predicted_speedup:
        return None
    return measured.estimate / row.predicted_speedup


def held_back(regular: LatencyRow | None, row: LatencyRow) -> str | None:
    """The strongest limit of the speed-up, as `main_limit`; None where costs are unknown, as beside other programs."""
    costs = costs_in_steps(regular, row)
    if costs is None or row.predicted_speedup is None or row.was_starved:
        return None
    tokens = row.tokens_per_iteration or 1.0
    proposed = row.mean_num_draft_tokens or 0.0
    if proposed < _SELDOM:
        return f"the draft seldom proposes: {proposed:.2f} tokens per iteration"
    on_gpu = any(device.startswith("cuda") for device in row.weight_bytes or ())
    if on_gpu and row.draft_runner == "eager":
        # A small draft's kernels take less time than their launches, which a CUDA graph saves.
        launches = "this program launches each kernel of the draft alone"
        return main_limit(tokens, proposed, costs, launches)
    return main_limit(tokens, proposed, costs)


def share_of_iteration(run: Run[LatencyRow]) -> float | None:
    """A regular step as a share of an iteration's time, both over the tokens after an answer's first, which any server
    allows; None where one of them is unknown.

    It is of the prompts that both arms finished, where these are known.
    """
    regular, row = run.row("regular"), run.last
    step_ms = None if regular is None else _step_ms(regular)
    ms_per_token, tokens = row.ms_per_token_after_first, row.tokens_per_iteration
    if regular is None or row.arm != "speculative" or not (step_ms and ms_per_token and tokens):
        return None
    share = step_ms / (ms_per_token * tokens)
    if pairs := pairs_of(run.prompt_rows):
        regular_answers, answers = zip(*pairs, strict=True)
        steps, decoding = (
            wait_for(arm_answers, is_batched=False, after_first=True)
            for arm_answers in (regular_answers, answers)
        )
        if min(*steps, *decoding) > 0:
            # Of a server that reports no iterations, those that its tokens took at the run's mean.
            num_iterations = drafts_of(answers).known_iterations or decoding.num_tokens / tokens
            share = (steps.ms / steps.num_tokens) / (decoding.ms / num_iterations)
    return share if 0 < share <= 1 / _LEAST_STEPS else None


def _step_ms(regular: LatencyRow) -> float | None:
    """The time of a regular step; None where it is unknown, and of a first command, which may draft too."""
    is_regular = regular.arm == "regular" and regular.draft != SECOND_COMMAND
    return regular.ms_per_token_after_first if is_regular and not regular.drafted else None
