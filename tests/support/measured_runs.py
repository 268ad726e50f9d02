"""What a run of `latency` has measured, from answers made by hand, for the groups of figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.commands.latency.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.commands.latency.record import LatencySettings
from harness.engines.timing import Generation
from harness.prompts.sets import PromptSet
from some_settings import settings_of


def figures(
    group: type[Group],
    regular: Sequence[Generation],
    speculative: Sequence[Generation] | None = None,
    units: Sequence[int] | None = None,
    *,
    settings: dict[str, Any] | None = None,
    **evidence: Any,
) -> Any:
    """The figures of the speculative arm, or of the regular one where it is alone.

    Args:
        units: as `MeasuredRun` has them; each generation is one by default.
        settings, evidence: what is changed of the settings, and of what was measured.
    """
    arms = {"regular": MeasuredArm("regular", list(regular))}
    if speculative is not None:
        arms["speculative"] = MeasuredArm("speculative", list(speculative))
    run = MeasuredRun(
        settings_of(LatencySettings, **(settings or {})),
        PromptSet("none", (), ""),
        arms,
        num_resamples=500,
        units=range(len(regular)) if units is None else units,
        moments=range(len(regular)),
        **evidence,
    )
    return group.measured(run, list(arms.values())[-1])
