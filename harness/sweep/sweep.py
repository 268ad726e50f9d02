"""A sweep as a whole: what it knows when it starts, and what it says when it ends, however it ends."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

# In a sweep's directory: how many jobs it has, since when, and the settings in which they differ.
SWEEP_FILE = "sweep.json"

# Of the sweep that this process began.
_directory: Path | None = None


class SweepCallback(Callback):
    """Hydra calls it in the process that was started by hand, before the first job."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note what jobs there will be, for those who say how many are left."""
        # Hydra imports this class for every command: what takes long to import waits until there is a sweep.
        from harness.results.files import replace_file

        global _directory
        _directory = Path(config.hydra.sweep.dir)
        sweeps = _sweep_overrides(config)
        trials = config.hydra.sweeper.get("n_trials")
        num_jobs = math.prod(len(list(sweep.sweep_iterator())) for sweep in sweeps) if trials is None else int(trials)
        varying = [sweep.key_or_group for sweep in sweeps]
        about = {"num_jobs": num_jobs, "started": time.time(), "varying": varying}
        replace_file(_directory / SWEEP_FILE, json.dumps(about).encode())
        print(f"{num_jobs} jobs in {_directory}", file=sys.stderr)


def finish(command: str) -> int:
    """Print the sweep's table, if this process began one, and give its exit code: 1 for a failed job, or a lost one."""
    global _directory
    if _directory is None:
        return 0
    from harness.results.files import read_rows
    from harness.results.sweep_report import exit_code, print_sweep
    from harness.sweep import jobs

    jobs.dismiss_crew()
    file = _directory / f"{command}.csv"
    num_jobs = json.loads((_directory / SWEEP_FILE).read_text(encoding="utf-8"))["num_jobs"]
    _directory = None
    rows = read_rows(file)
    print_sweep(command, rows, file, num_jobs)
    return exit_code(command, rows)


def _sweep_overrides(config: DictConfig) -> list[Override]:
    """The overrides that make several jobs of one command line, and those that an optimiser chooses for."""
    params = config.hydra.sweeper.get("params") or {}
    typed = [*config.hydra.overrides.task, *(f"{key}={value}" for key, value in params.items())]
    overrides = OverridesParser.create().parse_overrides(typed)
    return [override for override in overrides if override.is_sweep_override()]
