"""`sweep.json` in a sweep's directory: what is known when a sweep begins, for its jobs and its end.

What came of the jobs is in the sweep's CSV file, see `sweep_file.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from harness.config.errors import RunError

if TYPE_CHECKING:
    from harness.results.schema import RunRow

_FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Facts about all jobs of a sweep.

    Attributes:
        started: seconds since the epoch.
        varying: the settings in which jobs differ, `["draft", "decoding.num_draft_tokens"]`.
        methods: the ways to draft of all jobs, if jobs differ in the draft; else none.
        engines: the engines of all jobs, if jobs differ in the engine; else none.
        num_rounds: how often each job is measured (`repeats`).
        results_file: the file that collects the rows of all runs; None for no such file.
    """

    num_jobs: int
    started: float
    varying: list[str]
    methods: list[str]
    engines: list[str]
    num_rounds: int
    results_file: str | None

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


class SweepCallback(Callback):
    """Writes the manifest, in the process that the user started, before the first job.

    Attributes:
        directory: where the sweep that this process started writes; None before.
    """

    directory: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra before the first job."""
        # Hydra imports this module for every command: slow imports wait until there is a sweep.
        from harness.records.registry import COMMANDS
        from harness.results.locked_files import replace_file
        from harness.sweep.sweep_file import SweepFile

        directory = Path(config.hydra.sweep.dir)
        kind = COMMANDS[config.command].row
        results_file = OmegaConf.select(config, "results.file")
        if kind is not None:
            is_taken = SweepFile(directory, kind).is_foreign()
            if is_taken or collects_in(directory, kind, results_file):
                # An exception would become a warning of Hydra's: the first job raises it.
                return
        sweeps = _swept_overrides(config)
        # An optimiser says how many jobs it runs; else there is one for each combination.
        num_jobs = config.hydra.sweeper.get("n_trials")
        if not num_jobs:
            num_jobs = math.prod(len(list(sweep.sweep_iterator())) for sweep in sweeps)
        manifest = Manifest(
            num_jobs=num_jobs,
            started=time.time(),
            varying=[sweep.key_or_group for sweep in sweeps],
            methods=_drafting_methods(sweeps),
            engines=sorted(set(_choices(sweeps, "engine"))),
            num_rounds=len(_choices(sweeps, "repeat")) or 1,
            results_file=results_file,
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
    """Whether a directory's own file of rows is the file that collects those of all runs."""
    if not isinstance(collecting_file, str):
        return False
    own_file = directory / f"{kind.kind}.csv"
    return own_file.resolve() == Path(collecting_file).resolve()


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


def _drafting_methods(sweeps: list[Override]) -> list[str]:
    """The ways to draft of the jobs' drafts, if jobs differ in the draft."""
    from harness.menu.names import method_name

    # `pair=7B+lookup` sets both models.
    of_pairs = [pair.partition("+")[2] for pair in _choices(sweeps, "pair")]
    return sorted({method_name(draft) for draft in (*_choices(sweeps, "draft"), *of_pairs)})


def _choices(sweeps: list[Override], group: str) -> list[str]:
    """The values of a group in the jobs; [] where all jobs have the same."""
    for sweep in sweeps:
        if sweep.key_or_group == group:
            return list(map(str, sweep.sweep_iterator()))
    return []
