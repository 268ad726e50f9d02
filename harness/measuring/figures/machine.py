"""What the machine did besides while a run was timed; joules per token, and units in which GPUs were throttled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.measuring.figures.paired import paired_times
from harness.results.row import pooled, with_interval
from harness.results.schema import MaybeFloat, MaybeInt, MaybeText
from harness.results.statistics.interval import Interval

if TYPE_CHECKING:
    from harness.engines.protocol import Answered

# At most this share of an arm's answers may be shorter than the period in which a GPU counts its
# energy. Each of them is charged to whatever the GPU does when the period ends.
_MOST_TOO_SHORT = 0.1


@dataclass(frozen=True, kw_only=True)
class Machine(Group):
    """What else the machine did while a run was timed."""

    processor_share: MaybeFloat = pooled(
        "smallest",
        "CPU time received / requested (run / (run + wait)) during the measurement",
    )
    load: MaybeFloat = pooled("largest", "load average over the last minute, at the end")
    num_cores: MaybeInt = pooled("smallest", "cores that the process may use")
    other_gpu_processes: MaybeInt = pooled(
        "largest", "most processes on one of these GPUs at once, other than the run's own, by NVML"
    )
    lowest_gpu_clock_mhz: MaybeInt = pooled(
        "smallest", "lowest clock of a GPU's cores, by NVML", "MHz"
    )
    gpu_throttled: MaybeText = pooled("same", "why clocks of a GPU were lowered meanwhile, by NVML")

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        return cls() if run.quietness is None else cls(**run.quietness.columns())


@dataclass(frozen=True, kw_only=True)
class Energy(Group):
    """Joules per token, and in how many units GPUs were throttled; none without GPUs that report it."""

    num_units: MaybeInt = pooled("mean", "prompts, batches or laps during which GPUs were watched")
    num_throttled_units: MaybeInt = pooled(
        "largest", "of these, how many ended with lowered clocks"
    )
    joules_per_token: MaybeFloat = pooled(
        "mean",
        "energy of the GPUs per token, by NVML, idle power included; empty for MIG and very short answers",
        "J",
    )
    energy_ratio: Interval | None = with_interval(
        "mean",
        "regular / speculative energy per token, over all tokens",
        ends="95 % paired interval",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        used = [generation.gpu for generation in arm.generations if generation.gpu is not None]
        if not used or len(used) < len(arm.generations):
            return cls()
        units = arm.units
        throttled = {unit for unit, gpu in zip(units, used, strict=True) if gpu.throttled}
        joules = _joules(arm.generations)
        num_tokens = sum(map(_num_tokens, arm.generations))
        pair = run.pair(arm)
        return cls(
            num_units=len(set(units)),
            num_throttled_units=len(throttled),
            joules_per_token=sum(joules) / num_tokens if joules and num_tokens else None,
            energy_ratio=None if pair is None else _ratio(run, *pair),
        )


def _ratio(run: MeasuredRun, regular: MeasuredArm, speculative: MeasuredArm) -> Interval | None:
    """Energy per token of the regular arm over the speculative one's, with a paired interval over units; None where
    the joules of an arm are unknown.

    A unit in which an arm was too fast for the counter is left out.
    """
    from harness.results.statistics.ratios import log_ratio, totals_by_unit

    joules = []
    tokens = []
    size = min(len(regular.generations), len(speculative.generations))
    for arm in (regular, speculative):
        generations = arm.generations[:size]
        amounts = _joules(generations)
        lengths = list(map(_num_tokens, generations))
        if not amounts or 0 in lengths:
            return None
        joules.append(totals_by_unit(amounts, arm.units[:size]))
        tokens.append(totals_by_unit(lengths, arm.units[:size]))
    counted = (joules[0] > 0) & (joules[1] > 0)
    numerators = [joules[0][counted], tokens[1][counted]]
    denominators = [tokens[0][counted], joules[1][counted]]
    return log_ratio(numerators, denominators, paired_times(run, regular, speculative).unit)


def _joules(generations: Sequence[Answered]) -> list[float]:
    """The energy of each, in joules; [] where one is unknown, or many were too short to be counted."""
    known = [generation.gpu.joules for generation in generations if generation.gpu is not None]
    joules = [amount for amount in known if amount is not None]
    if len(joules) < len(generations) or joules.count(0) > _MOST_TOO_SHORT * len(joules):
        return []
    return joules


def _num_tokens(generation: Answered) -> int:
    return sum(request.num_tokens for request in generation.requests if request.answered)
