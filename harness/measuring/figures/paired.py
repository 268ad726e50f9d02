"""Computes the speed-up from the times of both arms, paired by unit: a prompt, a batch, a lap or a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.prompt_times import (
    Pair,
    batches_of,
    common_times,
    pairs_by_unit,
    places_by_unit,
    share_prompts,
    waits_by_unit,
)
from harness.results.row import pooled, setting
from harness.results.schema import MaybeBool, MaybeFloat, MaybeText, WithSpeedup
from harness.results.statistics import Floats
from harness.results.statistics.interval import Interval
from harness.results.statistics.iterations import fewest_iterations
from harness.results.statistics.ratios import (
    ExtraIterations,
    drift,
    drift_matters,
    ratio_of_totals,
)


@dataclass(frozen=True, kw_only=True)
class SpeedupFigures(Group, WithSpeedup):
    """The speed-up with its interval, and signs that the times are unreliable, such as drift."""

    precision: MaybeFloat = setting(
        "half width of the interval, as a share of the speed-up, at which measuring stops",
        "half_width",
    )
    stopped_by: MaybeText = pooled(
        "same",
        "why the run ended. For a run with `precision`, whose intervals have a level of 97 %: `precision`, `budget`,"
        " `blocks`, `num_prompts` or `prompts` (all of the set); for any other run: `budget`, or empty",
    )
    decode_speedup: Interval | None = pooled(
        "mean",
        "the speed-up without the time until the first tokens",
        per="ms_per_token_after_first",
    )
    drift: MaybeFloat = pooled(
        "mean",
        "speed-up in the second half of the run / speed-up in the first half",
    )
    drifted: MaybeBool = pooled(
        "mean",
        "whether the drift is significant and above 2 %; in a pooled row, whether this is true of most runs;"
        " empty if too few units were timed",
    )
    interleaved: MaybeBool = pooled("all", "whether the arms alternated")

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        if run.pair(arm) is None:
            return cls()

        times = paired_times(run)
        speedup = times.speedup(run.confidence)
        are_shared = share_prompts(places_by_unit(run.prompt_rows).values())
        if speedup.covers is not None and are_shared:
            # If units share prompts, the interval does not cover other texts. `covers` says what it covers.
            covers = dataclasses.replace(speedup.covers, same_texts=True)
            speedup = dataclasses.replace(speedup, covers=covers)
        # A drift is looked for in the order of time, so a batch that was sent twice counts as two.
        by_question = paired_times(run, by_question=True)
        change = drift(by_question.regular, by_question.speculative, unit=by_question.unit)
        decode_speedup = None
        # Not for requests to a server: the time at which their first tokens were decoded is not known.
        if not arm.was_sent:
            decode_speedup = paired_times(run, decode_only=True).speedup(run.confidence)
        return cls(
            speedup=speedup,
            stopped_by=run.stopped_by,
            decode_speedup=decode_speedup,
            drift=change.estimate if change.is_known else None,
            drifted=drift_matters(change) if change.has_bounds else None,
            # The arms always alternate from question to question. With a single question, the second arm simply
            # follows the first.
            interleaved=by_question.regular.size > 1,
        )


class PairedTimes(NamedTuple):
    """Length-adjusted times of both arms in ms, [num_units] each, in the order in which they were measured.

    After the adjustment (`ratios.at_equal_lengths`; `paired_times` has an example), the mean of an arm's values is its
    ms per token over all units, and the ratio of the arms' totals is the speed-up. A single value is not the ms per
    token of its unit.

    Attributes:
        unit: the name of a unit: `prompt`, `conversation`, `batch`, `lap` or `block`.
        lengths: [num_units], the tokens that the times were spent on, added up over both arms. A batch counts as one
            answer of mean length.
        extra_iterations: the speculative arm's iterations, and the fewest that its tokens need; None if the iterations
            are not known, or if nothing was drafted.
    """

    regular: Floats
    speculative: Floats
    unit: str
    lengths: Floats
    extra_iterations: ExtraIterations | None

    def speedup(self, confidence: float) -> Interval:
        """The speed-up: the ratio of the totals of both arms' values, with an interval over units."""
        return ratio_of_totals(
            [self.regular],
            [self.speculative],
            self.unit,
            confidence,
            lengths=self.lengths,
            extra_iterations=self.extra_iterations,
        )


def paired_times(
    run: MeasuredRun, *, by_question: bool = False, decode_only: bool = False
) -> PairedTimes:
    """Pair the times of both arms' answers by unit.

    All rows of a batch have the same time; the times of a lap's requests are added up. Only prompts that both arms
    answered count. For example, prompts 0 to 3 are sent in two laps of two. Each answer has 10 tokens, and prompt 3
    fails in the speculative arm. The times in milliseconds are:

        waits by prompt, regular        0: 200   1: 220   2: 210   3: 230
        waits by prompt, speculative    0: 100   1: 120   2: 110
        waits by lap                    regular 420, 210; speculative 220, 110
        divided by 15 tokens, the mean length of a lap: regular [28, 14], speculative [14.7, 7.3]

    Args:
        by_question: treat every batch or lap as a unit, in the order in which they were sent, even if the same prompts
            are sent again.
        decode_only: leave out the first token of each answer, and the time until it, if this time is known.
    """
    regular = run.arms["regular"]
    moment_of = attrgetter("moment") if by_question else None
    units = pairs_by_unit(run.prompt_rows, moment_of)
    waits = waits_by_unit(units, is_batched=not regular.was_sent, after_first=decode_only)
    [regular_times], [speculative_times] = common_times([waits])
    name = "batch"
    if run.in_blocks and not by_question:
        name = "block"
    elif all(len(generation.requests) == 1 for generation in regular.generations):
        has_turns = any((row.turn or 1) > 1 for row in run.prompt_rows)
        name = "conversation" if has_turns else "prompt"
    elif regular.was_sent:
        name = "lap"
    lengths = [sum(wait.num_tokens for wait in both) for both in waits.values()]
    # A unit in which an arm has no time is missing in `waits`.
    extra_iterations = _extra_iterations(run.arms["speculative"], [units[unit] for unit in waits])
    return PairedTimes(regular_times, speculative_times, name, np.array(lengths), extra_iterations)


def _extra_iterations(arm: MeasuredArm, units: Sequence[Sequence[Pair]]) -> ExtraIterations | None:
    """For each unit, the number of iterations, and the fewest iterations that its tokens need with the arm's K; None if
    nothing was drafted, or if any number of iterations is not known.

    Args:
        units: the pairs (regular answer, speculative answer) of each unit.
    """
    # The most tokens that an iteration drafted; 0 if none is known to have drafted.
    k = max((answer.drafts.longest for pairs in units for _, answer in pairs), default=0)
    if not k:
        return None
    totals = []
    for pairs in units:
        iterations = fewest = 0.0
        answers = [answer for _, answer in pairs]
        for batch in batches_of(answers, is_batched=not arm.was_sent):
            numbers = [answer.drafts.iterations for answer in batch]
            if None in numbers:
                return None
            # A batch is decoded until its last row has ended.
            iterations += max(number or 0.0 for number in numbers)
            fewest += max(fewest_iterations([answer.num_decoded for answer in batch], k))
        totals.append((iterations, fewest))
    # From pairs [num_units, 2] to two arrays [num_units] each.
    return ExtraIterations(*np.array(totals, dtype=np.float64).reshape(-1, 2).T)
