"""What a run or a sweep would measure, how long by earlier runs, and whether it can tell: `dry_run=true`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from harness.config.amounts import counted
from harness.config.model_names import SERVED
from harness.config.run import RunSettings
from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL


def preview_lines(jobs: Sequence[tuple[str, RunSettings]]) -> list[str]:
    """A line for each job, by its label and settings, and one for all of them."""
    lines = []
    known = []
    for number, (label, settings) in enumerate(jobs, start=1):
        num_prompts: int = getattr(settings, "num_asked", 0)
        notes = [counted(num_prompts, "prompt")] if num_prompts else []
        seconds = _decoding_seconds(settings, num_prompts)
        if seconds is not None:
            known.append(seconds)
            notes.append(f"about {_duration(seconds)}")
        fewest = FEWEST_FOR_INTERVAL * settings.batch_size
        if settings.COMPARES_TIMES and settings.draft is not None and 0 < num_prompts < fewest:
            notes.append(f"no interval below num_prompts={fewest}")
        lines.append(
            f"  [{number}/{len(jobs)}] {': '.join(filter(None, [label, ', '.join(notes)]))}"
        )
    times = [f"about {_duration(sum(known))} of decoding"] if known else []
    if len(known) < len(jobs):
        times.append(
            f"{len(jobs) - len(known)} of unknown time: no earlier run is of its model and load"
        )
    return [*lines, f"{counted(len(jobs), 'job')}: {', '.join(times)}. Nothing was measured."]


def _decoding_seconds(settings: RunSettings, num_prompts: int) -> float | None:
    """Time of both arms by the newest run of this model at this load; None without one."""
    if settings.results.file is None:
        return None
    ms_by_arm = {}
    for row in read_rows(settings.results.file, LatencyRow):
        is_same_model = settings.model.repository == SERVED or row.model == settings.model.name
        is_same_load = (row.engine, row.batch_size) == (settings.engine.name, settings.batch_size)
        if is_same_model and is_same_load and row.ms_per_token is not None:
            ms_by_arm[row.arm] = row.ms_per_token
    if not num_prompts or not ms_by_arm.keys() >= {*settings.arms}:
        return None
    ms = sum(ms_by_arm[arm] for arm in settings.arms)
    return ms * num_prompts * settings.decoding.max_new_tokens / 1000


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
