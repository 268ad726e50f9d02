"""A sweep's directory: `sweep.json` with the facts known when it begins, and a CSV file with the rows of its jobs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from harness.config.errors import RunError
from harness.menu.names import method_name
from harness.records.registry import COMMANDS, row_kinds
from harness.results.files import append_rows, as_csv, read_kind, rows_in
from harness.results.locked_files import locked, replace_file
from harness.results.schema import RunRow

_FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Facts about all jobs of a sweep.

    Attributes:
        started: seconds since the epoch.
        varying: the settings in which jobs differ: `["draft", "decoding.num_draft_tokens"]`.
        methods: the ways to draft of all jobs, if jobs differ in the draft; else none.
        engines: the engines of all jobs, if jobs differ in the engine; else none.
        num_rounds: how often each job is measured (`repeats`).
        results_file: the file that collects the rows of all runs; None for no such file.
        details: whether the tables behind the answer are printed too (`details=true`).
        racers: the settings in which each job of a race differs, as typed; empty for other sweeps.
    """

    num_jobs: int
    started: float
    varying: list[str]
    methods: list[str]
    engines: list[str]
    num_rounds: int
    results_file: str | None
    details: bool = False
    racers: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of the sweep in a directory."""
        return cls(**json.loads((directory / _FILE).read_text(encoding="utf-8")))

    def differing(self, overrides: Sequence[str]) -> list[str]:
        """Those of a job's overrides in which it differs from others."""
        keys = [override.lstrip("+").partition("=")[0] for override in overrides]
        pairs = zip(keys, overrides, strict=True)
        return [override for key, override in pairs if key in self.varying]

    def has_measured(self, row: RunRow) -> bool:
        """Whether a row was measured in this sweep, not taken over from an earlier one."""
        if row.timestamp is None:
            return False
        return datetime.fromisoformat(row.timestamp).timestamp() >= self.started


class SweepFile:
    """`multirun/…/latency.csv`: one final set of rows for each job, however it ended.

    Jobs of all processes of a launcher put their rows there and read those of others. The rows of a job have its number
    in the column `job`. Rows without a number are those of single runs in the same directory, which are left alone, and
    those that pool repeated jobs at the end.

    Args:
        sweep: the directory of the sweep.
        kind: of its rows.
    """

    def __init__(self, sweep: Path, kind: type[RunRow]) -> None:
        self.path = sweep / f"{kind.kind}.csv"
        self._kind = kind

    def is_foreign(self) -> bool:
        """Whether the file has other content than rows of this kind, which must not be overwritten."""
        if not self.path.is_file() or not self.path.stat().st_size:
            return False
        return read_kind(self.path, [*row_kinds(), self._kind]) is not self._kind

    def job_rows(self) -> list[RunRow]:
        """The rows of the jobs that have ended."""
        return [row for row in rows_in(self.path, self._kind) if row.job is not None]

    def put(self, job: int, rows: Sequence[RunRow]) -> list[RunRow]:
        """Put the rows of a job into the file, in place of any that it has there.

        Returns:
            The rows of all jobs that have ended.

        Raises:
            RunError: when writing fails; what the file held is then unharmed.
        """
        number = str(job)
        with locked(self.path) as file:
            kept = [row for row in rows_in(file.path, self._kind) if row.job != number]
            for row in rows:
                kept.append(dataclasses.replace(row, job=number))
            if kept:
                file.replace(as_csv(kept))
        return [row for row in kept if row.job is not None]

    def remove_jobs(self) -> None:
        """Remove what an earlier sweep wrote here. The directories of its jobs keep their rows.

        Raises:
            RunError: when writing fails; what the file held is then unharmed.
        """
        if not self.path.exists():
            return
        with locked(self.path) as file:
            rows = rows_in(file.path, self._kind)
            kept = [
                row
                for row in rows
                if row.job is None
                and "all" not in (getattr(row, "repeat", None), getattr(row, "share", None))
            ]
            if kept:
                file.replace(as_csv(kept))
            else:
                file.path.unlink()


def append_summaries(sweep: Path, rows: Sequence[RunRow]) -> None:
    """Append rows that sum up several jobs to the sweep's file, and to the one that collects all runs."""
    if not rows:
        return
    append_rows(SweepFile(sweep, type(rows[0])).path, rows)
    results_file = Manifest.read(sweep).results_file
    if results_file is not None:
        append_rows(results_file, rows)


class SweepCallback(Callback):
    """Writes the manifest, in the process that the user started, before the first job.

    Attributes:
        directory: where the sweep that this process started writes; None before.
    """

    directory: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra before the first job."""
        directory = Path(config.hydra.sweep.dir)
        kind = COMMANDS[config.command].row
        results_file = OmegaConf.select(config, "results.file")
        if kind is not None:
            is_taken = SweepFile(directory, kind).is_foreign()
            if is_taken or collects_in(directory, kind, results_file):
                # An exception would become a warning of Hydra's: the first job raises it.
                return
        sweeps = _swept_overrides(config)
        # `pair=7B+lookup` sets both models.
        of_pairs = [pair.partition("+")[2] for pair in _choices(sweeps, "pair")]
        drafts = [*_choices(sweeps, "draft"), *of_pairs]
        # An optimiser has a number of jobs; else there is one for each combination.
        num_jobs = config.hydra.sweeper.get("n_trials")
        if not num_jobs:
            num_jobs = math.prod(len(list(sweep.sweep_iterator())) for sweep in sweeps)
        manifest = Manifest(
            num_jobs=num_jobs,
            started=time.time(),
            varying=[sweep.key_or_group for sweep in sweeps],
            methods=sorted(set(map(method_name, drafts))),
            engines=sorted(set(_choices(sweeps, "engine"))),
            num_rounds=len(_choices(sweeps, "repeat")) or 1,
            racers=_racers(sweeps),
            results_file=results_file,
            details=bool(OmegaConf.select(config, "results.details")),
        )
        try:
            replace_file(directory / _FILE, json.dumps(dataclasses.asdict(manifest)).encode())
            if kind is not None:
                SweepFile(directory, kind).remove_jobs()
        except RunError:
            # Hydra would turn it into a warning; it fails itself at the same place.
            return
        SweepCallback.directory = directory
        jobs = "job" if num_jobs == 1 else "jobs"
        print(f"{num_jobs} {jobs} in {directory}", file=sys.stderr)


def collects_in(directory: Path, kind: type[RunRow], collecting_file: object) -> bool:
    """Whether the file for a directory's rows, `latency.csv`, is the one that collects the rows of all runs."""
    if not isinstance(collecting_file, str):
        return False
    file = directory / f"{kind.kind}.csv"
    return file.resolve() == Path(collecting_file).resolve()


def _swept_overrides(config: DictConfig) -> list[Override]:
    """The settings with several values, typed or chosen by an optimiser."""
    # An optimiser has its choices in the configuration. Hydra ignores them for a typed setting.
    choices = config.hydra.sweeper.get("params") or {}
    texts = [f"{key}={value}" for key, value in choices.items()]
    texts += config.hydra.overrides.task
    # The parser needs the configurations, because `glob(...)` is over them.
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    # Of several overrides of one setting the last counts.
    overrides: dict[str, Override] = {}
    for override in parser.parse_overrides(texts):
        overrides[override.get_key_element()] = override
    return [override for override in overrides.values() if override.is_sweep_override()]


def _racers(sweeps: list[Override]) -> list[str]:
    """The settings in which each job of a race differs, in the order of the job numbers of a share."""
    if not _choices(sweeps, "share"):
        return []
    varying = [
        [f"{sweep.get_key_element()}={value}" for value in sweep.sweep_string_iterator()]
        for sweep in sweeps
        if sweep.key_or_group != "share"
    ]
    return [" ".join(settings) for settings in itertools.product(*varying)]


def _choices(sweeps: list[Override], setting: str) -> list[str]:
    """The values that a setting has in the jobs, as text; [] where all jobs have the same."""
    for sweep in sweeps:
        if sweep.key_or_group == setting:
            return list(map(str, sweep.sweep_iterator()))
    return []
