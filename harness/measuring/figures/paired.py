"""The speed-up: the times of both arms, paired by what is independent: a prompt, a batch, or a lap of requests."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from harness.config.amounts import counted
from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import Ratio, pooled, setting
from harness.results.rows.prompts import share_prompts
from harness.results.schema import MaybeBool, MaybeFloat, MaybeText, WithSpeedup
from harness.results.statistics.interval import CONFIDENCE, Interval

if TYPE_CHECKING:
    from harness.engines.protocol import Answered, Wait
    from harness.results.statistics.arrays import Floats
    from harness.results.statistics.ratios import Rejections


@dataclass(frozen=True, kw_only=True)
class SpeedupFigures(Group, WithSpeedup):
    """The speed-up, how small a difference would show, and doubts about the times, such as drift."""

    precision: MaybeFloat = setting(
        "half width of the interval, as a share of the speed-up, at which to stop",
        "half_width",
    )
    stopped_by: MaybeText = pooled(
        "same",
        "what ended a run with `precision`: `precision`, `budget`, `blocks`, `num_prompts` or `prompts` (all);"
        " its intervals have a level of 97 %; or `budget` of any run",
    )
    decode_speedup: Interval | None = pooled(
        Ratio(over="ms_per_token_after_first"),
        "`speedup` without the time until the first tokens",
    )
    rare_units: MaybeText = pooled(
        "none", "one or two units with most of the speed-up's variance, in words", in_csv=False
    )
    drift: MaybeFloat = pooled(
        "geometric mean",
        "speed-up in the second half of the run over that in the first",
        in_csv=False,
    )
    drifted: MaybeBool = pooled(
        "mean",
        "whether that is significant and above 2 %; of several runs, in most of them; empty where too few were timed",
    )
    interleaved: MaybeBool = pooled("all", "whether the arms took turns")

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        pair = run.pair(arm)
        if pair is None:
            return cls()
        from harness.results.statistics.ratios import drift, drift_matters

        times = paired_times(run, *pair)
        speedup = times.speedup(run.confidence)
        places: dict[int, set[int]] = {}
        for generation, unit in zip(pair[0].generations, pair[0].units, strict=True):
            occurrences = [
                run.prompt_set.occurrence(request.index) for request in generation.requests
            ]
            places.setdefault(unit, set()).update(occurrence.place for occurrence in occurrences)
        if speedup.covers is not None and share_prompts(places):
            # Units with the same prompts do not allow for other texts.
            covers = dataclasses.replace(speedup.covers, same_texts=True)
            speedup = dataclasses.replace(speedup, covers=covers)
        in_time = paired_times(run, *pair, by="moment")
        change = drift(in_time.regular, in_time.speculative, unit=in_time.unit)
        decode_times = paired_times(run, *pair, decode_only=True)
        return cls(
            speedup=speedup,
            stopped_by=run.stopped_by,
            decode_speedup=decode_times.speedup(run.confidence),
            rare_units=times.rare_in_words(),
            drift=change.estimate if change.is_known else None,
            drifted=drift_matters(change) if change.has_bounds else None,
            # A single batch is one arm after the other.
            interleaved=in_time.regular.size > 1,
        )


class PairedTimes(NamedTuple):
    """Milliseconds per token of both arms, [num_units] each, in the order measured: the ratio of their totals is that
    of the arms' waits over all their tokens (`at_equal_lengths`).

    Attributes:
        unit: what a unit is called: `prompt`, `batch`, `lap` or `block`.
        lengths: tokens of both arms' answers, [num_units].
        rejections: of the speculative arm; None where its iterations are not known.
    """

    regular: Floats
    speculative: Floats
    unit: str
    lengths: Floats
    rejections: Rejections | None

    @property
    def arms(self) -> tuple[list[Floats], list[Floats]]:
        """As numerators and denominators."""
        return [self.regular], [self.speculative]

    def speedup(self, confidence: float = CONFIDENCE) -> Interval:
        """The ratio of both arms' total times, with an interval over units."""
        from harness.results.statistics.ratios import ratio_of_totals

        return ratio_of_totals(*self.arms, self.unit, confidence, self.lengths, self.rejections)

    def rare_in_words(self) -> str | None:
        """`1 of 8 prompts took 5.1 times as long as the others in the regular arm`; None where none hold most of the
        variance.
        """
        from harness.results.statistics.ratios import rare_units

        rare = rare_units(self.regular, self.speculative, self.lengths)
        if rare is None:
            return None
        arm = "regular" if rare.is_numerator else "speculative"
        units = counted(self.regular.size, self.unit)
        return f"{rare.number} of {units} took {rare.times:.1f} times as long as the others in the {arm} arm"


def paired_times(
    run: MeasuredRun,
    regular: MeasuredArm,
    speculative: MeasuredArm,
    *,
    by: Literal["unit", "moment"] = "unit",
    decode_only: bool = False,
) -> PairedTimes:
    """Pair what both arms answered: rows of a batch share a time, requests of a lap are added up.

    For example, prompts 0 to 3 are asked in two laps of two, each answer has 10 tokens, and prompt 3 fails in one of
    the arms. In milliseconds:

        waits by prompt, regular        0: 200   1: 220   2: 210   3: 230
        waits by prompt, speculative    0: 100   1: 120   2: 110
        over mean lengths of a unit, 15 tokens: regular [28, 14], speculative [14.7, 7.3]

    Args:
        by: the number of a `Question` by which times are added up.
        decode_only: leave out the time until the first tokens, and these.
    """
    from harness.results.statistics.ratios import at_equal_lengths, totals_by_unit

    def waits_of(generation: Answered) -> dict[int, Wait]:
        """By the index of the prompt or of the batch's first prompt."""
        return generation.decode_waits if decode_only else generation.waits

    speculative_waits: dict[int, Wait] = {}
    for generation in speculative.generations:
        speculative_waits |= waits_of(generation)
    units: list[int] = []
    pairs: list[tuple[Wait, Wait]] = []
    for generation in regular.generations:
        for index, wait in waits_of(generation).items():
            if index in speculative_waits:
                units.append(getattr(generation.question, by))
                pairs.append((wait, speculative_waits[index]))
    ms = [totals_by_unit([pair[arm].ms for pair in pairs], units) for arm in (0, 1)]
    tokens = [totals_by_unit([pair[arm].num_tokens for pair in pairs], units) for arm in (0, 1)]
    regular_times, speculative_times = at_equal_lengths(ms, tokens)
    name = "batch"
    if run.in_blocks and by == "unit":
        name = "block"
    elif all(len(generation.requests) == 1 for generation in regular.generations):
        name = "prompt"
    elif regular.was_sent:
        name = "lap"
    rejections = _rejections(speculative, by, units)
    return PairedTimes(regular_times, speculative_times, name, tokens[0] + tokens[1], rejections)


def _rejections(
    arm: MeasuredArm, by: Literal["unit", "moment"], units: Sequence[int]
) -> Rejections | None:
    """Iterations of an arm by unit, and the fewest that its tokens need; None where they are not known."""
    import numpy as np

    from harness.measuring.acceptance import drafted_k
    from harness.results.statistics.iterations import fewest_iterations
    from harness.results.statistics.ratios import Rejections

    k = drafted_k(arm.answered)
    if k is None:
        return None
    iterations: Counter[int] = Counter()
    fewest: Counter[int] = Counter()
    for generation in arm.generations:
        answered = [request for request in generation.requests if request.answered]
        numbers = [request.num_iterations or 0 for request in answered]
        if not all(numbers):
            return None
        least = fewest_iterations([request.num_tokens - 1 for request in answered], k)
        # A batch goes on until its last row has ended.
        together = sum if generation.has_request_times else max
        unit = getattr(generation.question, by)
        iterations[unit] += together(numbers)
        fewest[unit] += together(least)
    of_units = [(iterations[unit], fewest[unit]) for unit in dict.fromkeys(units)]
    return Rejections(*np.array(of_units, dtype=np.float64).reshape(-1, 2).T)
