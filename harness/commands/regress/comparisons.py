"""Runs before a change and after it, paired by settings and prompts, and how each figure changed.

Runs with the same settings are repetitions of one measurement; `Sides` has those before the change
and those after it. Each figure of it is compared over the units that all these runs have
(`Compared`): prompts, or batches or laps of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.commands.registry import measurement
from harness.reporting.changes import Compared, Sides
from harness.reporting.names import STARTS_SERVERS, distinct_names
from harness.results.runs import Run, grouped
from harness.results.schema import RunRow
from harness.results.statistics.multiplicity import adjusted_p_values

# The chance to be wrong that an adjusted p-value has to stay below.
_LEVEL = 0.05
# Settings in which repetitions of a measurement may differ, addresses of servers included.
_REPETITION = ("seed", "repeat", "repeats", "url", "regular_url")
# Settings that follow from another one, which names them where both differ.
_FOLLOWING = {
    "model": ("repository",),
    "draft": tuple(
        "draft_repository draft_quantization draft_method draft_sampling draft_layers"
        " max_ngram shared num_draft_tokens rule lenience lossy".split()
    ),
    "prompts": ("prompts_digest",),
    "rule": ("lossy",),
    "lenience": ("lossy",),
}
# Settings of each side that are searched for the nearest pair.
_MOST_SEARCHED = 100


def settings_key(run: Run) -> str:
    """The settings by which runs are paired, as text."""
    return json.dumps(settings_of(run.last), sort_keys=True, default=str)


def settings_of(row: RunRow) -> dict[str, Any]:
    """The settings of a row by which it is compared, and which prompts it had."""
    columns = row.columns()
    names = [name for name, column in columns.items() if column.kind == "setting"]
    kept = [name for name in names if name not in _REPETITION]
    settings = {name: getattr(row, name) for name in [*kept, "prompts_digest"] if name in columns}
    without_column = settings.pop("settings", None) or {}
    for name, value in without_column.items():
        # Another build, or other flags, are what is compared. `server_command` shows it.
        if name not in STARTS_SERVERS:
            settings[name] = value
    return settings


def has_repetitions(runs: Sequence[Run]) -> bool:
    """Whether two of them measured the same, and the times of their prompts are known."""
    timed = [run for run in runs if run.prompt_rows]
    return any(len(alike) > 1 for alike in grouped(timed, settings_key).values())


def nearest_difference(before: Sequence[Run], after: Sequence[Run]) -> dict[str, tuple[Any, Any]]:
    """The settings in which the two most similar runs differ, with both values; without those that follow from
    others. Empty if no command is on both sides.
    """
    candidates = []
    for new in _newest(after):
        for old in _newest(before):
            if new.command == old.command:
                candidates.append(_differing(settings_of(old.last), settings_of(new.last)))
    return min(candidates, key=len, default={})


def _newest(runs: Sequence[Run]) -> list[Run]:
    """A run of each combination of settings, the newest combination first."""
    by_settings = {settings_key(run): run for run in runs}
    return [*reversed(by_settings.values())][:_MOST_SEARCHED]


def _differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    differing = {}
    for name in before | after:
        if before.get(name) != after.get(name):
            differing[name] = (before.get(name), after.get(name))
    following = {name for leading in differing for name in _FOLLOWING.get(leading, ())}
    return {name: values for name, values in differing.items() if name not in following}


def compared_runs(
    before: Sequence[Run], after: Sequence[Run], margin: float, noise: Sequence[Run] = ()
) -> list[Compared]:
    """Compare the measurements that both sides have, figure by figure.

    Where a figure of several measurements is compared, its significance is adjusted for their
    number (Benjamini and Hochberg).

    Args:
        before, after: complete runs; those with the same settings are repetitions.
        margin: a change for the worse up to this share is tolerated.
        noise: runs of one program, whose differences are noise.
    """
    by_settings = grouped(after, settings_key)
    compared: list[Compared] = []
    for key, runs_before in grouped(before, settings_key).items():
        runs_after = by_settings.get(key)
        if runs_after:
            devices = {run.last.devices for run in (*runs_before, *runs_after)}
            alike = [run for run in noise if settings_key(run) == key]
            here = [run for run in alike if {run.last.devices} == devices]
            sides = Sides(runs_before, runs_after, margin, here)
            compared += measurement(runs_before[0].command).changes(sides)
    adjusted = list(compared)
    by_figure = grouped(range(len(compared)), lambda index: compared[index].figure.name)
    for indices in by_figure.values():
        comparisons = [compared[index].comparison for index in indices]
        p_values = [
            comparison.p_value if comparison else float("nan") for comparison in comparisons
        ]
        for index, p_value in zip(indices, adjusted_p_values(p_values), strict=True):
            is_claimed = compared[index].verdict in ("better", "worse")
            if len(indices) > 1 and is_claimed and p_value >= _LEVEL:
                reason = f"not significant among {len(indices)} comparisons"
                adjusted[index] = replace(compared[index], verdict="cannot tell", reason=reason)
    names = distinct_names([row.after for row in adjusted])
    return [replace(row, name=name) for row, name in zip(adjusted, names, strict=True)]
