"""Runs before a change and after it, paired by settings and prompts, and how each figure changed.

Runs with the same settings are repetitions of one measurement; `Sides` has those before the change
and those after it. Each figure of it is compared over the units that all these runs have
(`Compared`): prompts, or batches or laps of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
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
_OF_A_REPETITION = ("seed", "repeat", "repeats", "url", "regular_url")
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
    kept = [name for name in names if name not in _OF_A_REPETITION]
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
    sides = []
    for runs in (before, after):
        of_key = {settings_key(run): (run.command, settings_of(run.last)) for run in runs}
        newest_first = [*reversed(of_key.values())]
        sides.append(newest_first[:_MOST_SEARCHED])
    nearest: dict[str, tuple[Any, Any]] = {}
    for command_after, settings_after in sides[1]:
        for command_before, settings_before in sides[0]:
            if command_before == command_after:
                differing = _differing(settings_before, settings_after)
                if not nearest or len(differing) < len(nearest):
                    nearest = differing
    return nearest


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
    adjusted: list[Compared] = []
    for of_figure in grouped(compared, attrgetter("figure.name")).values():
        p_values = [one.comparison.p_value if one.comparison else float("nan") for one in of_figure]
        for one, p_value in zip(of_figure, adjusted_p_values(p_values), strict=True):
            if len(of_figure) > 1 and one.verdict in ("better", "worse") and p_value >= _LEVEL:
                reason = f"not significant among {len(of_figure)} comparisons"
                one = replace(one, verdict="cannot tell", reason=reason)
            adjusted.append(one)
    # Back from the order of figures to that of measurements.
    places = {one.before.run: place for place, one in enumerate(compared)}
    ordered = sorted(adjusted, key=lambda one: places[one.before.run])
    names = distinct_names([one.after for one in ordered])
    return [replace(one, name=name) for one, name in zip(ordered, names, strict=True)]
