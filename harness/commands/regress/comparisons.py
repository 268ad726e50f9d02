"""Runs before a change and after it, paired by settings and prompts, and how each figure changed.

Runs with the same settings are repetitions of one measurement; `BeforeAndAfter` has those before the change
and those after it. Each figure of it is compared over the units that all these runs have
(`Compared`): prompts, or batches or laps of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.commands.registry import measurement
from harness.reporting.changes import BeforeAndAfter, Compared
from harness.reporting.names import STARTS_SERVERS, distinct_names
from harness.results.judging.change import judged_together
from harness.results.runs import Run, grouped

# Settings in which repetitions of a measurement may differ, addresses of servers included.
_REPETITION = ("seed", "repeat", "repeats", "url", "regular_url")


def settings_of(run: Run) -> dict[str, Any]:
    """The settings by which runs are paired, and which prompts they had; those without a value are left out."""
    columns = run.last.columns()
    names = [name for name, column in columns.items() if column.kind == "setting"]
    kept = [name for name in [*names, "prompts_digest"] if name not in _REPETITION]
    settings = {name: getattr(run.last, name, None) for name in kept}
    without_column = settings.pop("settings", None) or {}
    for name, value in without_column.items():
        # Builds and flags may differ: they are what is compared.
        if name not in STARTS_SERVERS:
            settings[name] = value
    return {name: value for name, value in settings.items() if value is not None}


def settings_key(run: Run) -> str:
    """The settings of a run as text."""
    return json.dumps(settings_of(run), sort_keys=True, default=str)


def has_repetitions(runs: Sequence[Run]) -> bool:
    """Whether two of them measured the same, and the times of their prompts are known."""
    timed = [run for run in runs if run.prompt_rows]
    return any(len(alike) > 1 for alike in grouped(timed, settings_key).values())


def compared_runs(
    before: Sequence[Run], after: Sequence[Run], margin: float, noise: Sequence[Run] = ()
) -> list[Compared]:
    """Compare the measurements that both sides have, figure by figure.

    Significance is adjusted for the number of all comparisons (Benjamini and Hochberg).

    Args:
        before, after: complete runs; those with the same settings are repetitions.
        margin: a change for the worse that is shown to be smaller than this share counts as no worse.
        noise: runs of one program, whose differences are noise.
    """
    by_settings = grouped(after, settings_key)
    compared: list[Compared] = []
    for key, runs_before in grouped(before, settings_key).items():
        runs_after = by_settings.get(key)
        if runs_after:
            devices = {run.last.devices for run in (*runs_before, *runs_after)}
            same_noise = [
                run for run in noise if settings_key(run) == key and {run.last.devices} == devices
            ]
            sides = BeforeAndAfter(runs_before, runs_after, margin, same_noise)
            compared += measurement(runs_before[0].command).changes(sides)
    # All that a reader sees is one family, whatever figures it has.
    p_values = [figure.comparison.p_value for figure in compared]
    statements = judged_together([figure.statement for figure in compared], p_values)
    names = distinct_names([figure.after for figure in compared])
    return [
        replace(figure, name=name, statement=statement)
        for figure, name, statement in zip(compared, names, statements, strict=True)
    ]
