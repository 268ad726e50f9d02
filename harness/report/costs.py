"""Costs of drafting and verifying in target steps, and which of them limits the speed-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.results.schema import LatencyRow


class Costs(NamedTuple):
    """A draft step (c) and a verification (v), both in target steps."""

    draft: float
    verify: float


class Limit(NamedTuple):
    """One limit of the predicted speed-up.

    Attributes:
        ideal_speedup: what would be predicted without it.
        cause: a few words.
        numbers: the figures behind the cause, and the ideal.
    """

    ideal_speedup: float
    cause: str
    numbers: str


@dataclass(frozen=True)
class Prediction:
    """Leviathan's model of an iteration.

    Attributes:
        tokens: mean number of tokens that an iteration yields.
        proposed: draft tokens per iteration (K).
        acceptable: the most of them that can be accepted: of a tree, one path; None for all.
    """

    tokens: float
    proposed: float
    costs: Costs
    acceptable: int | None = None

    @property
    def speedup(self) -> float:
        drafting = self.proposed * self.costs.draft
        return self.tokens / (drafting + self.costs.verify)

    def main_limit(self) -> Limit:
        """The limit whose removal would raise the speed-up most."""
        draft, verify = self.costs
        most_tokens = 1 + (self.proposed if self.acceptable is None else self.acceptable)
        slow_draft = Limit(
            self.tokens / verify,
            "the draft is too slow",
            f"one of its steps costs {draft:.2f} of the target's; if it were free",
        )
        slow_verification = Limit(
            self.tokens / (self.proposed * draft + min(verify, 1)),
            "verification costs too much",
            f"{self.proposed:.3g} draft tokens cost {verify:.2f} target steps; at one step",
        )
        low_acceptance = Limit(
            most_tokens / (self.proposed * draft + verify),
            "acceptance is too low",
            f"{self.tokens:.2f} of {most_tokens:.3g} tokens per iteration; with all of them",
        )
        return max(slow_draft, slow_verification, low_acceptance)


def tokens_per_iteration(row: LatencyRow) -> float | None:
    """Tokens that an iteration yields: over all iterations, else over those that drafted."""
    return row.tokens_per_iteration or row.mean_acceptance_length


def proposed_per_iteration(row: LatencyRow) -> float | None:
    """Draft tokens per iteration: over all iterations, else over those that drafted."""
    return row.mean_num_draft_tokens or row.mean_proposed


def costs_in_steps(regular: LatencyRow | None, row: LatencyRow) -> Costs | None:
    """Measured costs; None where one of them is unknown."""
    if regular is None or row.draft_ms is None or row.verify_ms is None:
        return None
    step_ms = regular.target_step_ms
    proposed = proposed_per_iteration(row)
    if not step_ms or not proposed:
        return None
    return Costs(row.draft_ms / proposed / step_ms, row.verify_ms / step_ms)


def rest_ms(row: LatencyRow) -> float | None:
    """Time of an iteration beyond drafting and verifying."""
    if row.iteration_ms is None or row.draft_ms is None or row.verify_ms is None:
        return None
    return max(0.0, row.iteration_ms - row.draft_ms - row.verify_ms)


class OtherK(NamedTuple):
    """The speed-up that is predicted for a K, with its ends as far as acceptance is uncertain."""

    num_draft_tokens: int
    speedup: float
    low: float | None
    high: float | None


def lengths_by_k(row: LatencyRow) -> list[tuple[float, float | None, float | None]]:
    """Tokens per iteration, had at most 1, 2, ... tokens been proposed, each with its interval."""
    lengths = row.acceptance_length_by_num_draft_tokens or []
    unknown: list[float | None] = [None] * len(lengths)
    lows = row.acceptance_length_by_num_draft_tokens_low or unknown
    highs = row.acceptance_length_by_num_draft_tokens_high or unknown
    return list(zip(lengths, lows, highs, strict=False))


def predicted_by_k(regular: LatencyRow | None, row: LatencyRow) -> list[OtherK]:
    """Predictions for every K up to the measured one; [] for trees, and where K varied or costs are unknown.

    The cost of verifying K + 1 tokens lies between that of one token, a step of the target, and what
    was measured: as the passes of each width do where they were timed, else on a line.
    """
    measured = row.num_draft_tokens
    costs = costs_in_steps(regular, row)
    lengths = lengths_by_k(row)
    if row.draft_tree not in (None, "chain"):
        return []
    if costs is None or not isinstance(measured, int) or len(lengths) != measured:
        return []
    others = []
    for k, (length, *ends) in enumerate(lengths, 1):
        verification = 1 + (costs.verify - 1) * _share_of_verification(row, k, measured)
        cost = k * costs.draft + verification
        others.append(OtherK(k, length / cost, *(end and end / cost for end in ends)))
    return others


def _share_of_verification(row: LatencyRow, k: int, measured: int) -> float:
    """How far the cost of verifying k draft tokens is on the way from none to the measured number."""
    known = enumerate(row.pass_ms_by_width or [])
    times = {drafted: ms for drafted, ms in known if ms is not None}
    if not {0, measured} <= set(times) or times[measured] <= times[0]:
        return k / measured
    ms = float(np.interp(k, list(times), list(times.values())))
    return (ms - times[0]) / (times[measured] - times[0])


def share_of_predicted(row: LatencyRow) -> float | None:
    """Measured over predicted speed-up: the prediction is of decoding, without reading the prompt."""
    measured = row.decode_speedup or row.speedup
    if not measured or not row.predicted_speedup:
        return None
    return measured / row.predicted_speedup


def gave_up(row: LatencyRow) -> bool:
    """Whether `auto` stopped drafting: too few draft tokens are left to compute costs from."""
    return row.num_draft_tokens == "auto" and (proposed_per_iteration(row) or 0.0) < 0.5


def _deepest_level(row: LatencyRow) -> int | None:
    """The deepest level of a tree that was accepted, as a head may draft fewer than K; None for chains."""
    if row.draft_tree in (None, "chain"):
        return None
    times = row.acceptance_histogram or []
    return max((level for level, count in enumerate(times) if count), default=None)


def held_back(regular: LatencyRow | None, row: LatencyRow, *, brief: bool = False) -> str | None:
    """The strongest limit of the speed-up; None where the costs are unknown."""
    costs = costs_in_steps(regular, row)
    if costs is None or row.predicted_speedup is None:
        return None
    if gave_up(row):
        return "drafting does not pay: auto gave it up"
    tokens = tokens_per_iteration(row) or 1.0
    proposed = proposed_per_iteration(row) or 0.0
    prediction = Prediction(tokens, proposed, costs, acceptable=_deepest_level(row))
    limit = prediction.main_limit()
    if brief:
        return f"{limit.cause} ({limit.ideal_speedup:.2f}× without that)"
    ideal = f"it would be {limit.ideal_speedup:.2f}× instead of {prediction.speedup:.2f}×"
    return f"{limit.cause}: {limit.numbers} {ideal}"
