"""What makes two measurements the same: a digest of everything that determines their numbers, known before torch is."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness.config.commands import RunSettings
from harness.config.settings import ModelSettings
from harness.results.environment import cpu_name, environment_columns, gpu_names, num_usable_cores
from harness.results.files import read_rows

# Settings that say where results go and how a run is carried out, and nothing about a number.
_NOT_MEASURED = ("results", "resume", "job_timeout_s", "gpus_per_job", "force")
# Without a draft these have nothing to act on: one measurement serves all their values.
_OF_THE_DRAFT = ("num_draft_tokens", "rule", "lenience", "synthetic_acceptance")

_PACKAGE = Path(__file__).resolve().parents[1]


def measurement_digest(settings: RunSettings, leaving_out: Collection[str] = ()) -> str:
    """16 hex digits of settings, weights, prompts, machine, versions and our own source.

    Of weights on a hub the repository and revision count, of weights in a directory its files' sizes and times.

    Args:
        leaving_out: names of further settings that do not matter.
    """
    asked = dataclasses.asdict(settings)
    for name in (*_NOT_MEASURED, *leaving_out):
        asked.pop(name, None)
    if settings.draft is None:
        for name in _OF_THE_DRAFT:
            asked["decoding"].pop(name, None)
    prompts = asked.pop("prompts", None)
    everything: dict[str, Any] = {
        "kind": type(settings).__name__,
        "settings": asked,
        "prompts": prompts and _contents(Path(prompts["file"])),
        "weights": [_weights(model) for model in (settings.model, settings.draft) if model is not None],
        "machine": gpu_names() or [cpu_name(), num_usable_cores(), os.environ.get("OMP_NUM_THREADS")],
        "versions": {key: value for key, value in environment_columns().items() if key.endswith("_version")},
        "source": _source(),
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[:16]


def measured_rows(path: str | Path, measurement: str) -> list[dict[str, str]]:
    """The rows of the newest complete run of a measurement in a shared file and those beside it; [] without one."""
    rows = [row for row in read_rows(path) if row.get("measurement") == measurement and row.get("status") == "ok"]
    return _newest(rows)


def newest_run(path: str | Path) -> list[dict[str, str]]:
    """The rows that were written last, all of one run; [] where there is no file."""
    return _newest(read_rows(path))


def _newest(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    # Rows of one run are written at once, with one time.
    latest = max((row["timestamp"] for row in rows), default=None)
    return [row for row in rows if row["timestamp"] == latest]


def _weights(model: ModelSettings) -> object:
    """What tells these weights from others of the same name."""
    directory = Path(model.repository)
    if not directory.is_dir():
        return model.repository, model.revision
    files = sorted(file for file in directory.iterdir() if file.is_file())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _contents(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


@functools.cache
def _source() -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(_PACKAGE.rglob("*.py")))).hexdigest()
