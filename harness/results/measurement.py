"""When two measurements are the same: a digest of everything that determines their figures, known before torch is."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from harness.config.machine import cpu_name, gpu_names, num_usable_cores
from harness.config.run import RunSettings
from harness.config.settings import ModelSettings
from harness.menu.records import METHODS
from harness.results.environment import environment_columns
from harness.results.files import read_rows
from harness.results.schema import RunRow

AnyRunRow = TypeVar("AnyRunRow", bound=RunRow)

# Settings that say where results go and how a run is carried out, and change no figure.
_NOT_MEASURED = ("results", "repeats", "resume", "job_timeout_s", "gpus_per_job", "force")
# Without a draft these have no effect: one measurement serves all their values.
_OF_THE_DRAFT = ("num_draft_tokens", "rule", "lenience", "synthetic_acceptance")

_PACKAGE = Path(__file__).resolve().parents[1]
# The rooms that decode and measure. The others change no figure.
_MEASURING = ("menu", "decoding", "drafting", "runners", "models", "engines", "experiments")


def measurement_digest(settings: RunSettings, leaving_out: Collection[str] = ()) -> str:
    """16 hex digits of settings, weights, prompts, machine, versions and the source that decodes and measures.

    Weights on a hub count with repository and revision, weights in a directory with their files' sizes and times.

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
    if prompts:
        prompts = {"contents": _contents(Path(prompts["file"])), "too_long": prompts["too_long"]}
    everything: dict[str, Any] = {
        "kind": type(settings).__name__,
        "settings": asked,
        "prompts": prompts,
        "weights": [
            _weights(model) for model in (settings.model, settings.draft) if model is not None
        ],
        "machine": gpu_names()
        or [cpu_name(), num_usable_cores(), os.environ.get("OMP_NUM_THREADS")],
        "versions": {
            key: value for key, value in environment_columns().items() if key.endswith("_version")
        },
        "source": _source(),
        "method": settings.draft and METHODS.source(settings.draft.method),
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]


def further_settings(settings: object, kind: type[RunRow]) -> dict[str, Any] | None:
    """The settings that are not at their defaults and have no column in such rows, by name."""
    columns = kind.columns().items()
    told = {about["path"] or name for name, about in columns if about["kind"] != "circumstance"}
    return _departures(settings, told, "") or None


def _departures(settings: Any, told: Collection[str], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name, getattr(settings, field.name)
        if name in told or name in _NOT_MEASURED:
            continue
        if dataclasses.is_dataclass(value):
            found |= _departures(value, told, f"{name}.")
        elif value != field.default and field.default is not dataclasses.MISSING:
            # An architecture or a device map would take the whole row.
            text = json.dumps(value, sort_keys=True, default=str)
            long = isinstance(value, Mapping)
            found[name] = hashlib.sha256(text.encode()).hexdigest()[:8] if long else value
    return found


def measured_rows(path: str | Path, kind: type[AnyRunRow], measurement: str) -> list[AnyRunRow]:
    """The rows of the newest complete run of a measurement in a shared file and its siblings; [] without one."""
    return _newest(
        [
            row
            for row in read_rows(path, kind)
            if row.measurement == measurement and row.status == "ok"
        ]
    )


def newest_run(path: str | Path, kind: type[AnyRunRow]) -> list[AnyRunRow]:
    """The rows of the newest run; [] where there is no file."""
    return _newest(read_rows(path, kind))


def _newest(rows: list[AnyRunRow]) -> list[AnyRunRow]:
    latest = max((row.run or "" for row in rows), default=None)
    return [row for row in rows if (row.run or "") == latest]


def _weights(model: ModelSettings) -> object:
    """What distinguishes these weights from others of the same name."""
    directory = Path(model.repository)
    if not model.repository or not directory.is_dir():
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
    files = sorted(file for room in _MEASURING for file in (_PACKAGE / room).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
