"""How many experts of a mixture a verification reads, and a regular step.

Reading weights takes most of the time of a pass over few tokens. Each token of a verification may
take other experts, whose weights are then read as well. So verification costs a mixture more than a
dense model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from harness.commands.latency.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import pooled
from harness.results.schema import MaybeFloat, MaybeInt

if TYPE_CHECKING:
    from harness.decoding.protocols import Iteration
    from harness.engines.protocol import Engine, Question, Reference

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


class _Verified(NamedTuple):
    """A row of a verification: all tokens that it has read, and how many of them were new to it."""

    token_ids: Sequence[int]
    num_new: int


def experts_read(engine: Engine, question: Question) -> Experts | None:
    """Let the speculative arm answer a question again, and count.

    None for a dense model, or where an engine does not report what it proposed.
    """
    reference = engine.reference
    arm = engine.arms[-1]
    if reference is None or reference.num_experts is None or not arm.tells_drafts:
        return None
    from harness.engines.timing import run_lap

    generation = run_lap(engine, arm, question)
    verifications = list(_verifications(question.prompts, generation.iterations))
    # Each row of a verification is a pass, so that only every n-th verification is counted.
    num_passes = len(verifications) * len(question.prompts)
    every = max(1, math.ceil(num_passes / _MOST_PASSES))
    layers: list[_Layer] = []
    for rows in verifications[::every]:
        layers += _layers(reference, rows)
    if not layers:
        return None
    return Experts(
        num_experts=reference.num_experts,
        experts_per_step=statistics.fmean(len(layer.step) for layer in layers),
        experts_per_verification=statistics.fmean(len(layer.verification) for layer in layers),
    )


def _verifications(
    prompts: Sequence[Sequence[int]], iterations: Sequence[Iteration]
) -> Iterator[list[_Verified]]:
    """The rows of each verification, from the records of an answer."""
    texts = [list(prompt) for prompt in prompts]
    for iteration in iterations:
        rows = zip(iteration.rows, iteration.proposed, strict=True)
        verified = [
            _Verified([*texts[row], *proposed], len(proposed) + 1) for row, proposed in rows
        ]
        if any(iteration.proposed):
            yield verified
        for row, tokens in zip(iteration.rows, iteration.tokens, strict=True):
            texts[row] += tokens


class _Layer(NamedTuple):
    """Experts that the rows of a batch read together in a layer: in a step, and in a verification."""

    step: set[int]
    verification: set[int]


def _layers(reference: Reference, rows: Sequence[_Verified]) -> list[_Layer]:
    """The experts that a verification reads, and that a step in its place would."""
    layers: list[_Layer] = []
    for row in rows:
        for number, choices in enumerate(reference.experts(row.token_ids, row.num_new)):
            if number == len(layers):
                layers.append(_Layer(set(), set()))
            # A step reads the first of the new tokens alone.
            layers[number].step.update(choices[0])
            for chosen in choices:
                layers[number].verification.update(chosen)
    return layers
