"""The record of a sweep's start, for its jobs in their processes: `sweep.json` in its directory."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from harness.config.errors import RunError

_FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a sweep knows of its jobs.

    Attributes:
        started: seconds since the epoch.
        varying: the settings in which jobs differ.
        methods: the ways to draft, where jobs differ in the draft.
    """

    num_jobs: int
    started: float
    varying: list[str]
    methods: list[str]

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of the sweep in a directory."""
        return cls(**json.loads((directory / _FILE).read_text(encoding="utf-8")))


class SweepCallback(Callback):
    """Writes the manifest. Hydra calls it in the process that the user started, before the first job.

    Attributes:
        directory: of the sweep that this process started; None before.
    """

    directory: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See the class."""
        # Hydra imports this class for every command: slow imports wait until there is a sweep.
        from harness.menu.names import method_name
        from harness.results.files import replace_file

        directory = Path(config.hydra.sweep.dir)
        # An optimiser has its choices, and their number, in the configuration. Of a setting that is also typed Hydra
        # takes the typed values alone.
        sweeper = config.hydra.sweeper
        chosen = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
        # With its configurations, because `glob(...)` is over them.
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        overrides = parser.parse_overrides([*chosen, *config.hydra.overrides.task])
        last = {override.get_key_element(): override for override in overrides}
        sweeps = [override for override in last.values() if override.is_sweep_override()]
        num_jobs = sweeper.get("n_trials") or math.prod(
            len(list(sweep.sweep_iterator())) for sweep in sweeps
        )
        drafts = [
            str(choice).rpartition("+")[2]
            for sweep in sweeps
            if sweep.key_or_group in ("draft", "pair")
            for choice in sweep.sweep_iterator()
        ]
        methods = sorted(set(map(method_name, drafts)))
        manifest = Manifest(
            num_jobs, time.time(), [sweep.key_or_group for sweep in sweeps], methods
        )
        try:
            replace_file(directory / _FILE, json.dumps(dataclasses.asdict(manifest)).encode())
        except RunError:
            # Hydra would turn it into a warning; it fails itself at the same place.
            return
        SweepCallback.directory = directory
        print(f"{num_jobs} job{'' if num_jobs == 1 else 's'} in {directory}", file=sys.stderr)
