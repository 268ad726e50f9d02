"""How many experts of a mixture a verification reads, and a regular step.

Reading weights takes most of the time of a pass over few tokens. Each token of a verification may
take other experts, whose weights are then read as well. So verification costs a mixture more than a
dense model.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import pooled
from harness.results.schema import MaybeFloat, MaybeInt

if TYPE_CHECKING:
    from harness.engines.protocol import Engine, Question

# Passes that are made to count: each reads a whole text again.
_MOST_PASSES = 64


@dataclass(frozen=True, kw_only=True)
class Experts(Group):
    """Different experts that a pass reads in a layer, averaged over layers and passes."""

    num_experts: MaybeInt = pooled(
        "mean", "experts in a layer of the target; empty for a dense model"
    )
    experts_per_step: MaybeFloat = pooled(
        "mean", "different experts of a layer that a regular step reads, all rows together"
    )
    experts_per_verification: MaybeFloat = pooled(
        "mean", "different experts of a layer that a verification reads, all rows together"
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        return cls() if run.experts is None or run.pair(arm) is None else run.experts


def experts_read(engine: Engine, question: Question) -> Experts | None:
    """Let the speculative arm answer a question again, and count.

    None for a dense model, or where an engine does not report what it proposed.
    """
    arm = engine.arms[-1]
    if engine.weights is None or not arm.traits.reports_drafts:
        return None
    reference = engine.weights.reference
    if reference.num_experts is None:
        return None
    from harness.engines.arrivals import Arrival
    from harness.engines.timing import timed_answer

    arrivals: list[Arrival] = []
    timed_answer(engine, arm, question, arrivals.extend)
    # What all rows of a batch got from one iteration arrived at the same moment.
    iterations = [list(rows) for _, rows in itertools.groupby(arrivals, attrgetter("seconds"))]
    num_verifications = sum(any(row.proposed for row in rows) for rows in iterations)
    # Each row of a verification is a pass, so that only every n-th verification is counted.
    every = max(1, math.ceil(num_verifications * len(question.prompts) / _MOST_PASSES))
    texts = [list(prompt) for prompt in question.prompts]
    in_steps: list[int] = []
    in_verifications: list[int] = []
    place = 0
    for rows in iterations:
        if any(row.proposed for row in rows):
            if place % every == 0:
                # The experts that all rows read together, by layer.
                of_step: defaultdict[int, set[int]] = defaultdict(set)
                of_verification: defaultdict[int, set[int]] = defaultdict(set)
                for row in rows:
                    read = [*texts[row.row], *row.proposed]
                    choices_by_layer = reference.experts(read, len(row.proposed) + 1)
                    for layer, choices in enumerate(choices_by_layer):
                        # A step reads the first of the new tokens alone.
                        of_step[layer].update(choices[0])
                        of_verification[layer].update(*choices)
                in_steps += map(len, of_step.values())
                in_verifications += map(len, of_verification.values())
            place += 1
        for row in rows:
            texts[row.row] += row.tokens
    if not in_steps:
        return None
    return Experts(
        num_experts=reference.num_experts,
        experts_per_step=statistics.fmean(in_steps),
        experts_per_verification=statistics.fmean(in_verifications),
    )
