"""The speed-up: the times of both arms, paired by what is independent: a prompt, a batch, or a lap of requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from harness.commands.latency.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.coverage import of_same_texts
from harness.results.row import pooled, setting, with_interval
from harness.results.schema import MaybeBool, MaybeFloat, MaybeText, WithSpeedup
from harness.results.statistics.interval import CONFIDENCE, Interval

if TYPE_CHECKING:
    from harness.engines.timing import Generation
    from harness.results.statistics.arrays import Floats


@dataclass(frozen=True, kw_only=True)
class Speedup(Group, WithSpeedup):
    """The speed-up, how small a difference would show, and doubts about the times, such as drift."""

    precision: MaybeFloat = setting(
        "half of the width of the speed-up's interval, as a share of it, at which the run was to stop",
        "half_width",
    )
    stopped_by: MaybeText = pooled(
        "same",
        "what ended a run with `precision`: that it was reached, the last prompt, or `budget`; its intervals have a"
        " level of 97 %, so that they cover 95 % although they were looked at",
    )
    decode_speedup: Interval | None = with_interval(
        "mean",
        "`speedup` without the time until the first tokens: the longer the answers, the closer is `speedup` to it",
        ends="95 % paired interval",
    )
    visible_difference: MaybeFloat = pooled(
        "none",
        "a difference between the arms of this share is found four times in five; smaller ones less often",
    )
    drift: Interval | None = with_interval(
        "mean",
        "speed-up in the second half of the run over that in the first",
        ends="95 % interval",
    )
    drifted: MaybeBool = pooled("any", "whether that is significant and above 2 %")
    reproducible: MaybeBool = pooled(
        "all",
        "`False` where the same settings give other texts: K of `auto` follows measured times",
    )
    interleaved: MaybeBool = pooled(
        "all", "whether the arms took turns; `False` where drift of the machine is not excluded"
    )
    aa_ratio: Interval | None = with_interval(
        "mean",
        "`speedup` of the regular arm over itself, measured before with `engine.aa=true`",
        ends="95 % paired interval",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        pair = run.pair(arm)
        if pair is None:
            return cls()
        from harness.results.statistics.power import visible_difference
        from harness.results.statistics.ratios import drift
        from harness.results.statistics.runs import ratio_over_runs

        regular, speculative = (arm.generations for arm in pair)
        times = paired_times(regular, speculative, run.units, in_blocks=run.in_blocks)
        # With equal token counts this is the ratio of total times.
        speedup = times.speedup(*run.resampling, run.confidence)
        if run.share_prompts:
            # Units with the same prompts do not allow for other texts.
            speedup = dataclasses.replace(speedup, covers=of_same_texts(speedup.covers))
        visible = None
        if times.regular.size:
            estimate = ratio_over_runs(times.regular[None], times.speculative[None], times.unit)
            visible = visible_difference(estimate) if estimate.has_interval else None
        in_time = paired_times(regular, speculative, run.moments)
        change = drift(in_time.regular, in_time.speculative, unit=in_time.unit)
        decode_times = paired_times(
            regular, speculative, run.units, decode_only=True, in_blocks=run.in_blocks
        )
        reproducible = None
        if run.settings.engine.name == "local":
            decoding = run.settings.decoding
            # K=auto goes by measured times, and which numbers and coins a token gets depends on K.
            is_by_chance = decoding.temperature > 0 or decoding.synthetic_acceptance is not None
            reproducible = not (decoding.num_draft_tokens == "auto" and is_by_chance)
        return cls(
            speedup=speedup,
            stopped_by=run.stopped_by,
            decode_speedup=decode_times.speedup(*run.resampling),
            visible_difference=visible,
            drift=change.change,
            drifted=change.matters,
            reproducible=reproducible,
            # A single batch is one arm after the other.
            interleaved=len(set(run.moments)) > 1,
            aa_ratio=run.identical,
        )


class PairedTimes(NamedTuple):
    """Milliseconds per token of both arms, [num_units] each, in the order measured.

    Attributes:
        unit: what a unit is called: `prompt`, `batch`, `lap` or `block`.
    """

    regular: Floats
    speculative: Floats
    unit: str

    def speedup(self, num_resamples: int, seed: int, confidence: float = CONFIDENCE) -> Interval:
        """The ratio of both arms' total times, with a bootstrap interval over units, or
        Student's t over blocks.
        """
        from harness.results.statistics.ratios import ratio_of_totals, ratio_over_blocks

        if self.unit == "block":
            return ratio_over_blocks(self.regular, self.speculative, confidence)
        return ratio_of_totals(
            self.regular, self.speculative, num_resamples, seed, confidence, self.unit
        )


def paired_times(
    regular: Sequence[Generation],
    speculative: Sequence[Generation],
    units: Sequence[int] | None = None,
    *,
    decode_only: bool = False,
    in_blocks: bool = False,
) -> PairedTimes:
    """Pair what both arms answered: rows of a batch share a time, requests of a lap are added up.

    For example, prompts 0 to 3 are asked in two laps of two, and prompt 3 fails in one of the arms:

        times by prompt, regular        0: 20   1: 22   2: 21   3: 23
        times by prompt, speculative    0: 10   1: 12   2: 11
        regular [42, 21], speculative [22, 11]

    Args:
        regular, speculative: answers to the same questions, in the same order; in a run that was
            stopped, one arm may have one answer fewer.
        units: the unit of each question, where several are one: turns of the same conversations,
            or questions that are asked again. By default each is a unit.
        in_blocks: whether each question is a block, with a start of each arm.
        decode_only: leave out the time until the first tokens, and these.
    """

    from harness.results.statistics.ratios import totals_by_unit

    def times_of(generation: Generation) -> dict[int, float]:
        """Milliseconds per token, by the index of the prompt or of the batch's first prompt."""
        return generation.decode_times if decode_only else generation.times

    speculative_ms: dict[int, float] = {}
    for generation in speculative:
        speculative_ms |= times_of(generation)
    units_of_pairs: list[int] = []
    regular_times: list[float] = []
    speculative_times: list[float] = []
    for number, generation in enumerate(regular):
        unit = number if units is None else units[number]
        for index, milliseconds in times_of(generation).items():
            if index in speculative_ms:
                units_of_pairs.append(unit)
                regular_times.append(milliseconds)
                speculative_times.append(speculative_ms[index])
    return PairedTimes(
        totals_by_unit(regular_times, units_of_pairs),
        totals_by_unit(speculative_times, units_of_pairs),
        "block" if in_blocks else _unit(regular),
    )


def _unit(generations: Sequence[Generation]) -> str:
    """The name of a question, for `PairedTimes.unit`."""
    if all(len(generation.requests) == 1 for generation in generations):
        return "prompt"
    return "lap" if any(generation.sent for generation in generations) else "batch"
