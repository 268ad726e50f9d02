"""Figures of the machine: work for other programs while a run was timed."""

from __future__ import annotations

from dataclasses import dataclass

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import pooled
from harness.results.schema import MaybeFloat, MaybeInt, MaybeText

# A machine counts as idle if the process received at least this share of the processor time that it requested.
QUIET = 0.9


@dataclass(frozen=True, kw_only=True)
class MachineFigures(Group):
    """The machine's work for other programs while a run was timed."""

    processor_share: MaybeFloat = pooled(
        "smallest",
        "CPU time received / requested (run / (run + wait)) during the measurement",
    )
    load: MaybeFloat = pooled("largest", "load average over the last minute, at the end")
    num_cores: MaybeInt = pooled("smallest", "cores that the process may use")
    other_gpu_processes: MaybeInt = pooled(
        "largest", "most processes of other programs that were seen at once on one of these GPUs"
    )
    lowest_gpu_clock_mhz: MaybeInt = pooled("smallest", "lowest clock of a GPU's cores", "MHz")
    gpu_throttled: MaybeText = pooled(
        "same", "reasons why clocks of a GPU were lowered during the measurement"
    )
    num_throttled_units: MaybeInt = pooled(
        "largest",
        "answers of an arm (to a prompt, a batch or a lap) after which clocks of a GPU were lowered",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        return cls() if run.quietness is None else cls(**run.quietness.columns)
