"""The columns of a run of `latency`, from what it has measured so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, Literal

from harness.commands.latency.asking import asks_again
from harness.commands.latency.figures.energy import energy_columns, energy_ratio_columns
from harness.commands.latency.figures.experts import ExpertsRead
from harness.commands.latency.figures.goodput import goodput_columns, goodput_ratio_columns
from harness.commands.latency.figures.measured_arm import MeasuredArm, prediction
from harness.commands.latency.figures.paired import drift_columns, paired_times, reach_columns
from harness.commands.latency.record import LatencySettings
from harness.commands.latency.speculation_profile import MeasuredAcceptance, length_columns
from harness.engines.roofline import Roof
from harness.engines.timing import Generation
from harness.measuring.quietness import Quietness
from harness.prompts.sets import PromptSet
from harness.results.acceptance import Acceptance
from harness.results.coverage import of_same_texts
from harness.results.statistics.interval import CONFIDENCE, Interval
from harness.results.statistics.stopping import CONFIDENCE_OF_LOOKS


@dataclass
class LatencyFigures:
    """The figures that a run has measured so far; anything else has its default here.

    Attributes:
        arms: by name, the regular one first.
        units: of each question, the same number for those whose answers are not independent, such
            as turns of a conversation; intervals are over units.
        moments: of each question, the number of its batch or lap in time.
        in_blocks: whether each question is a block, with a start of each arm.
        share_prompts: whether units share prompts, so that an interval over them covers no prompts.
        salted: whether a server's prefix cache heeds salts; None where there is none.
        end_tokens: with which the model ends a text; none with random weights, whose texts mean
            nothing.
        suspicion: columns about another engine's sampling.
        identical: the regular arm measured against itself.
        stopped_by: what ended a run with `precision`.
        pass_ms: the time of a pass of the target over one token, over two, and so on; None for
            those that were not timed.
        roofs: of the target, and of the draft where it reads weights of its own.
        smaller_k_follow: whether acceptance at a smaller K follows from what was measured.
    """

    settings: LatencySettings
    prompt_set: PromptSet
    arms: dict[str, MeasuredArm]
    units: Sequence[int] = ()
    moments: Sequence[int] = ()
    in_blocks: bool = False
    share_prompts: bool = False
    salted: bool | None = None
    end_tokens: frozenset[int] = frozenset()
    quietness: Quietness | None = None
    suspicion: dict[str, Any] = field(default_factory=dict)
    identical: Interval | None = None
    experts: ExpertsRead | None = None
    pass_ms: list[float | None] | None = None
    roofs: Sequence[Roof] = ()
    smaller_k_follow: bool = True
    stopped_by: Literal["precision", "prompts", "budget"] | None = None

    @property
    def resampling(self) -> tuple[int, int]:
        """Samples and seed of every bootstrap."""
        return self.settings.num_resamples, self.settings.seed

    def speedup_so_far(self) -> Interval:
        """The speed-up of what both arms have answered, with the interval that a run is stopped by."""
        regular, speculative = self.arms.values()
        of_both = regular.generations, speculative.generations
        times = paired_times(*of_both, self.units, in_blocks=self.in_blocks)
        return times.speedup(*self.resampling, CONFIDENCE_OF_LOOKS)

    def acceptance_by_prompt(self) -> MeasuredAcceptance:
        """Return the acceptance of each prompt that the speculative arm answered."""
        by_place: dict[int, Acceptance] = {}
        for request in self.arms["speculative"].answered:
            # Turns of a conversation are not independent, nor are repetitions of a prompt.
            place = self.prompt_set.occurrence(request.index).place
            so_far = by_place.get(place, Acceptance())
            by_place[place] = so_far + Acceptance.of(request.outcomes)
        return MeasuredAcceptance(
            requests=list(by_place.values()),
            categories=[self.prompt_set.at(place).category for place in by_place],
            num_resamples=self.settings.num_resamples,
            seed=self.settings.seed,
            num_levels=self.settings.num_levels,
            extrapolates=self.smaller_k_follow,
        )

    def columns(self, arm: MeasuredArm) -> dict[str, Any]:
        """Return the columns of one of the arms."""
        columns: dict[str, Any] = {
            "arm": arm.name,
            "seed": self.settings.seed_of_run,
            "prompts_digest": self.prompt_set.digest,
            "salted": self.salted,
        }
        if self.quietness is not None:
            columns |= self.quietness.columns()
        columns |= arm.columns(self.end_tokens)
        columns["cached_from_before"] = self._cached_from_before(arm)
        columns |= energy_columns(arm.generations, self.units)
        slo = self._slo
        if slo:
            columns |= goodput_columns(arm.generations, slo)
        if self.roofs:
            target = self.roofs[0]
            columns["step_bytes"] = target.step_bytes
            columns["floor_ms"] = target.floor_ms
            columns["copy_bandwidth_bytes_per_s"] = target.bandwidth
        if arm.name == "speculative" and "regular" in self.arms:
            columns |= self._against_regular(arm)
        if asks_again(self.settings, self.prompt_set):
            asked = [self.prompt_set.occurrence(request.index) for request in arm.requests]
            different = {(occurrence.place, occurrence.turn) for occurrence in asked}
            columns["num_different_prompts"] = len(different)
        return columns

    def _cached_from_before(self, arm: MeasuredArm) -> int | None:
        """Cached tokens of prompts that are new to this run, beyond what they share with others of
        it; None where no answer tells.
        """
        cached: dict[tuple[int, ...], int] = {}
        for generation in arm.generations:
            assert generation.question is not None
            for prompt, request in zip(
                generation.question.prompts, generation.requests, strict=True
            ):
                asked = self.prompt_set.occurrence(request.index)
                # The later turns of a conversation go on after answers.
                is_new = asked.repeat == 0 and asked.turn == 0
                if is_new and request.answered and request.num_cached is not None:
                    cached[tuple(prompt)] = request.num_cached
        if not cached:
            return None
        prompts = sorted(cached)
        num_known = 0
        for place, prompt in enumerate(prompts):
            # In this order a prompt shares most with one of its neighbours.
            neighbours = [*prompts[max(0, place - 1) : place], *prompts[place + 1 : place + 2]]
            shared = [len(commonprefix([prompt, other])) for other in neighbours]  # noqa: RUF071
            num_known += max(0, cached[prompt] - max(shared, default=0))
        return num_known

    @property
    def _slo(self) -> Mapping[str, float] | None:
        """The times that were asked for, of an engine that takes requests."""
        return getattr(self.settings.engine, "slo", None)

    def _against_regular(self, speculative: MeasuredArm) -> dict[str, Any]:
        """Return the columns that only the speculative arm has."""
        regular = self.arms["regular"]
        of_both = regular.generations, speculative.generations
        columns = {
            **self.suspicion,
            "aa_ratio": self.identical,
            **self._speedup_columns(*of_both),
            "predicted_speedup": prediction(regular, speculative),
            "pass_ms_by_width": self.pass_ms,
            **length_columns(self.acceptance_by_prompt()),
            **energy_ratio_columns(*of_both, self.units, *self.resampling),
        }
        slo = self._slo
        if slo:
            columns |= goodput_ratio_columns(*of_both, self.units, slo, *self.resampling)
        if self.experts is not None:
            columns["num_experts"] = self.experts.num_experts
            columns["experts_per_step"] = self.experts.step
            columns["experts_per_verification"] = self.experts.verification
        if len(self.roofs) > 1:
            draft = self.roofs[1]
            columns["draft_step_bytes"] = draft.step_bytes
            columns["draft_floor_ms"] = draft.floor_ms
        if self.settings.engine.name == "local":
            decoding = self.settings.decoding
            # K=auto goes by measured times, and which numbers and coins a token gets depends on K.
            is_by_chance = decoding.temperature > 0 or decoding.synthetic_acceptance is not None
            depends_on_times = decoding.num_draft_tokens == "auto" and is_by_chance
            columns["reproducible"] = not depends_on_times
        return columns

    def _speedup_columns(
        self, regular: Sequence[Generation], speculative: Sequence[Generation]
    ) -> dict[str, Any]:
        """Return the columns of the measured speed-up."""
        times = paired_times(regular, speculative, self.units, in_blocks=self.in_blocks)
        in_time = paired_times(regular, speculative, self.moments)
        # Without the time until the first tokens.
        decode_times = paired_times(
            regular, speculative, self.units, decode_only=True, in_blocks=self.in_blocks
        )
        # With equal token counts this is the ratio of total times.
        confidence = CONFIDENCE if self.settings.precision is None else CONFIDENCE_OF_LOOKS
        speedup = times.speedup(*self.resampling, confidence)
        # Units with the same prompts do not allow for other texts.
        covers = of_same_texts(speedup.covers) if self.share_prompts else speedup.covers
        return {
            **reach_columns(times),
            **drift_columns(in_time),
            "stopped_by": self.stopped_by,
            "speedup": dataclasses.replace(speedup, covers=covers),
            "decode_speedup": decode_times.speedup(*self.resampling),
            # A single batch is one arm after the other.
            "interleaved": len(set(self.moments)) > 1,
        }
