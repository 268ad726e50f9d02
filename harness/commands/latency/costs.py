"""The cost of an iteration and what follows: which cost limits the speed-up, what other K would have given, and over
the K of a sweep a fixed part and one per draft token, where the times are such a line, and else their steps.

Of rows of one run of `latency`, `row` is that of the speculative arm, `regular` that of the regular one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.config.amounts import amount, percent
from harness.measuring.prices import (
    StepCosts,
    costs_in_steps,
    measured_over_k,
    points_of,
    steps_by_k,
    yields_by_k,
)
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Table
from harness.results.judging.choice import Choice, choice_of
from harness.results.price.value import ratio
from harness.results.runs import Run
from harness.results.statistics.interval import Coverage, Interval

# What an iteration of another K costs, over what follows from the phases of those that were measured.
_OTHER_K = Interval(1.0, 1 / 1.05, 1.05)
# The most predictions for other K that fit on a line.
_MOST_K = 8


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


def predicted_by_k(regular: LatencyRow | None, row: LatencyRow) -> dict[int, Interval]:
    """The speed-up predicted for every K up to the measured one; never above the tokens per iteration.

    {} where smaller K are not known, where K varied, or where costs are unknown or too noisy, as beside other programs.
    """
    costs = costs_in_steps(regular, row)
    yields = yields_by_k(row)
    if costs is None or row.was_starved or len(yields) != row.num_draft_tokens:
        return {}
    # Files do not say what the intervals of a list cover.
    covers = Coverage(row.num_different_prompts or row.num_prompts or 1, "prompt")
    return {
        k: replace(yields[k].scaled(1 / steps), covers=covers)
        for k, steps in steps_by_k(row, costs).items()
    }


def choice_of_k(regular: LatencyRow | None, row: LatencyRow) -> Choice | None:
    """What may be said of every K up to the measured one, by `predicted_by_k`; None where fewer than two are known.

    Yields of two K count as independent, although they are of the same texts: more K are alike than need be.
    """
    by_acceptance = predicted_by_k(regular, row)
    if len(by_acceptance) < 2:
        return None
    predictions = {}
    for k, speedup in by_acceptance.items():
        predictions[k] = ratio(speedup, _OTHER_K) if speedup.has_bounds else speedup

    def share_of(k: int, best: int) -> Interval:
        return ratio(predictions[k], by_acceptance[best])

    return choice_of(predictions, share_of)


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
    on_gpu = any(device.startswith("cuda") for device in row.weight_bytes or ())
    if on_gpu and row.draft_runner == "eager":
        # A small draft's kernels take less time than their launches, which a CUDA graph saves.
        launches = "this program launches each kernel of the draft alone"
        return main_limit(tokens, proposed, costs, launches)
    return main_limit(tokens, proposed, costs)


def share_of_iteration(run: Run[LatencyRow]) -> float | None:
    """A regular step as a share of an iteration's time; None where one of them is unknown."""
    points = [point for point in points_of(run) if point.width > 1 and point.steps.is_known]
    return 1 / points[0].steps.estimate if points else None


def iteration_line(runs: Sequence[Run[LatencyRow]]) -> str | None:
    """`An iteration takes 21.4 ms (20.9 to 22.0) + 3.10 ms (2.80 to 3.40) per draft token ...`, and what follows; where
    the times are no line, each of them and the steps between them.

    Args:
        runs: of one pair with several K.

    Returns:
        None where fewer than two K have a time.
    """
    cost = measured_over_k(runs)
    if not cost.loads:
        return None
    load = cost.loads[0]
    shape = cost.shape(load)
    step_ms = cost.point(0, load).ms
    if shape is None or not step_ms.is_known:
        return None
    step = f"a regular step takes {_ms(Interval(step_ms.estimate))}"
    fixed, slope = shape.fixed, shape.per_token
    if fixed is None or slope is None:
        points = [point for point in cost.points if point.rows == load and point.width > 1]
        times = [f"{_ms(Interval(point.ms.estimate))} at K={point.width - 1}" for point in points]
        unknown = "the price of a K between them is not known"
        return f"An iteration takes {', '.join(times)}: {shape.why_no_line}; {step}: {unknown}."
    if slope.estimate <= 0:
        return f"An iteration takes {_ms(fixed)}, and no measurable time per draft token; {step}."
    unit = f" (95 % intervals over {slope.covers})" if slope.has_bounds else ""
    costs = f"{_ms(fixed)} + {_ms(slope)} per draft token{unit}"
    share = slope.estimate / step_ms.estimate
    follows = f"a draft token costs {percent(share)} of a regular step"
    highest = max(map(_decode_gain, runs))
    if highest:
        # One more token adds its chance to the yield of an iteration, and its share to the steps.
        least = percent(min(1.0, share * highest))
        follows += f": at a decode-only {highest:.2f}× one more gains only if over {least} of iterations accept it"
    return f"An iteration takes {costs}; {step}: {follows}."


def _decode_gain(run: Run[LatencyRow]) -> float:
    """Tokens of an iteration over its steps; 0 where one of them is unknown."""
    return (run.last.tokens_per_iteration or 0.0) * (share_of_iteration(run) or 0.0)


def _ms(time: Interval) -> str:
    """`21.4 ms (20.9 to 22.0)`."""
    form = ".1f" if abs(time.estimate) >= 10 else ".2f"
    bounds = time.bounds(form)
    return f"{time.estimate:{form}} ms{f' ({bounds})' if bounds else ''}"


def times_table(regular: LatencyRow, row: LatencyRow) -> Table:
    """The phases of an iteration, what follows for other K, and other costs, in lines."""
    lines = (
        ("an iteration", _phases(regular, row)),
        ("by K", _by_k(regular, row)),
        ("target reads", _roof(regular.step_bytes, regular.floor_ms, regular.target_step_ms)),
        ("draft reads", _draft_reads(row)),
    )
    return Table.from_lines("reason", lines, "Where the time goes")


def _phases(regular: LatencyRow, row: LatencyRow) -> str | None:
    """The time of an iteration, and its phases; None where one is unknown."""
    times = (row.iteration_ms, row.draft_ms, row.verify_ms, regular.target_step_ms)
    if None in times:
        return None
    total, drafting, verifying, step = (f"{ms:.2f}" for ms in times)
    phases = f"drafting {drafting}, verifying {verifying}; a target step {step}"
    if row.host_share is not None:
        phases += f"; this program's own host {percent(row.host_share)} of it"
    batch = "; of a row, and a batch lasts as long as its slowest"
    return f"{total} ms; {phases}{batch if (row.batch_size or 1) > 1 else ''}"


def _by_k(regular: LatencyRow, row: LatencyRow) -> str | None:
    """`1: 1.42 to 1.51×  2: 1.80 to 1.97×`: what this run predicts for smaller K; None where it predicts none."""
    choice = choice_of_k(regular, row)
    if choice is None:
        return None
    shown = []
    for k, verdict in [*choice.verdicts.items()][:_MOST_K]:
        figure = verdict.interval
        shown.append(f"{k}: {figure.bounds() or f'{figure.estimate:.2f}'}×")
    about = "intervals for all K at once, with 5 % for what an iteration costs"
    return "; ".join(filter(None, [f"{'  '.join(shown)} predicted ({about})", choice.words]))


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
