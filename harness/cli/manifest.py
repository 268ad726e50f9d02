"""A sweep's directory: `sweep.json` with the facts known when it begins, and a CSV file with the rows of its jobs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from harness.cli import signals
from harness.commands.command import Command
from harness.commands.registry import configured, row_kinds
from harness.config.amounts import counted
from harness.config.engines import EngineSettings, check_settings_have_no_key
from harness.config.errors import RunError, SettingError
from harness.config.run import MOST_REPEATS
from harness.results.files import append_rows, as_csv, read_kind, rows_in
from harness.results.locked_files import locked, replace_file
from harness.results.schema import RunRow

_FILE = "sweep.json"
# Files that every run writes into its directory.
_WRITTEN = (
    "summary.txt",
    "result.json",
    "environment.json",
    "schedule_vllm.json",
    "log.txt",
    ".hydra",
)
# The setting with the number of a round.
_ROUND = "repeat"
# The setting with the number of a job's command among those behind `--`.
SERVER = "server"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Facts about all jobs of a sweep.

    Attributes:
        num_jobs: in all rounds together.
        started: seconds since the epoch.
        choices: the values of each setting in which jobs differ, the one that varies slowest first, as typed:
            `{"draft": ["lookup", "tiny_draft"], "seed": ["1", "2"]}`.
        is_repeated: whether every job runs several times: `repeat` then has the number of the round.
        results_file: the file that collects the rows of all runs; None for no such file.
        details: whether the tables behind the answer are printed too (`details=true`).
        format: of what is printed: `text` or `json`.
    """

    num_jobs: int
    started: float
    choices: dict[str, list[str]]
    is_repeated: bool = False
    results_file: str | None = None
    details: bool = False
    format: str = "text"

    @property
    def jobs_per_round(self) -> int:
        return self.num_jobs // len(self.choices.get(_ROUND, [""]))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of the sweep in a directory."""
        return cls(**json.loads((directory / _FILE).read_text(encoding="utf-8")))

    @classmethod
    def is_in(cls, directory: Path) -> bool:
        """Whether a directory is that of a sweep."""
        try:
            cls.read(directory)
        except (OSError, ValueError, TypeError):
            return False
        return True

    def label(self, overrides: Sequence[str], engine: EngineSettings) -> str:
        """The overrides in which a job differs from others, as they are typed: `draft=lookup K=4`."""
        differing = []
        for override in overrides:
            key = override.lstrip("+").partition("=")[0]
            if key == SERVER:
                differing.append(f"-- {shlex.join(vars(engine)['start_command'])}")
            elif key in self.choices:
                differing.append(override)
        label = " ".join(differing)
        return label.replace("decoding.num_draft_tokens=", "K=").replace("engine.vary.", "")


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

    def collects(self, results_file: object) -> bool:
        """Whether it is the file that collects the rows of all runs."""
        if not isinstance(results_file, str):
            return False
        # Unlike `Path.resolve` this takes links that lead to themselves, which `check_appendable` refuses.
        return os.path.realpath(self.path) == os.path.realpath(results_file)

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
            kept = []
            for row in rows_in(file.path, self._kind):
                # Rows over all rounds of a job have no number either.
                if row.job is None and getattr(row, _ROUND, None) != "all":
                    kept.append(row)
            if kept:
                file.replace(as_csv(kept))
            else:
                file.path.unlink()


def check_unused(config: DictConfig) -> None:
    """Raise a SettingError for the directory of a run or a sweep that has files which would be replaced."""
    is_sweep = config.hydra.mode is RunMode.MULTIRUN
    setting, value = "hydra.run.dir", config.hydra.run.dir
    if is_sweep:
        setting, value = "hydra.sweep.dir", config.hydra.sweep.dir
    check_settings_have_no_key([f"{setting}={value}"])
    directory = Path(value)
    command = configured(config.command)
    if isinstance(command, Command):
        own = SweepFile(directory, command.row)
        rule = "must be another directory than that of"
        results_file = _results_file(config)
        if own.collects(results_file):
            file = f"results.file={results_file}, which collects all runs"
            raise SettingError(setting, f"{rule} {file}", value)
        # A single run leaves such a file alone, and writes another one.
        if is_sweep and own.is_foreign():
            file = f"your own {own.path.name}, which the sweep would replace"
            raise SettingError(setting, f"{rule} {file}", value)
    if is_sweep and Manifest.is_in(directory):
        # It goes on, or replaces its own jobs.
        return
    written = [*_WRITTEN, "multirun.yaml", _FILE, *(f"0/{name}" for name in _WRITTEN)]
    for name in written if is_sweep else _WRITTEN:
        if os.path.lexists(directory / name):
            raise SettingError(setting, f"has a {name} already: name another directory", value)


def append_summaries(sweep: Path, rows: Sequence[Any]) -> None:
    """Append rows that pool several jobs (`pooled_runs`) to the sweep's file, and to the one that collects all runs.

    In a sweep that is resumed, those that a file has already are not appended again.
    """
    if not rows:
        return
    kind = type(rows[0])
    for path in (SweepFile(sweep, kind).path, Manifest.read(sweep).results_file):
        if path is None:
            continue
        known_rows: list[Any] = rows_in(Path(path), kind)
        known_runs = [row.pooled_runs for row in known_rows]
        new = [row for row in rows if row.pooled_runs not in known_runs]
        if new:
            append_rows(path, new)


class SweepCallback(Callback):
    """Writes the manifest before the first job, in the process that the user started, and sees to it that every job
    runs once before any runs again, so that drift of the machine meets all jobs alike.

    Attributes:
        directory: where the sweep that this process started writes; None before.
        is_preview: whether nothing is going to be measured there.
    """

    directory: ClassVar[Path | None] = None
    is_preview: ClassVar[bool] = False

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra before the first job."""
        directory = Path(config.hydra.sweep.dir)
        command = configured(config.command)
        kind = command.row if isinstance(command, Command) else None
        try:
            choices = _choices(config)
        except ValueError:
            # `range(0,3,0)`: Hydra reports it again.
            return
        if _ROUND in choices:
            # The first setting varies slowest, and an experiment's own list comes before what is typed: named first in
            # that list, `repeat` keeps this place.
            choices = {_ROUND: choices.pop(_ROUND), **choices}
            params = config.hydra.sweeper.get("params") or {}
            with read_write(config.hydra):
                config.hydra.sweeper.params = {_ROUND: ",".join(choices[_ROUND]), **params}
        manifest = Manifest(
            num_jobs=math.prod(map(len, choices.values())),
            started=time.time(),
            choices=choices,
            is_repeated=_ROUND in choices,
            results_file=_results_file(config),
            details=bool(OmegaConf.select(config, "results.details")),
            format=OmegaConf.select(config, "results.format") or "text",
        )
        try:
            replace_file(directory / _FILE, json.dumps(dataclasses.asdict(manifest)).encode())
            if kind is not None:
                SweepFile(directory, kind).remove_jobs()
        except RunError:
            # Hydra would turn it into a warning; it fails itself at the same place.
            return
        SweepCallback.directory = directory
        launcher = OmegaConf.select(config, "hydra.launcher._target_") or ""
        if not SweepCallback.is_preview:
            print(f"{counted(manifest.num_jobs, 'job')} in {directory}", file=sys.stderr)
        if launcher.endswith((".SlurmLauncher", ".RayLauncher")):
            # From now on this process only waits for jobs that run elsewhere: a signal ends that with the sweep's
            # table.
            signals.raise_postponed()


def _results_file(config: DictConfig) -> str | None:
    """The file that collects the rows of all runs; None where each job has its own, such as
    `results/${oc.env:SLURM_JOB_ID}.csv` of jobs that a launcher starts.
    """
    try:
        file: str | None = OmegaConf.select(config, "results.file")
    except OmegaConfBaseException:
        return None
    return file


def round_overrides(command: str, settings: Sequence[str]) -> list[str]:
    """Overrides that make a sweep of several rounds: `["repeat=1,2,3"]` for repeats=3, [] for a single round."""
    matches = [re.fullmatch(r"\+*repeats=(\d+)", setting) for setting in settings]
    typed = [int(match[1]) for match in matches if match]
    # The last one counts.
    repeats = typed[-1] if typed else 1
    # A larger number is not made into a sweep: the settings refuse it.
    is_repeated = 1 < repeats <= MOST_REPEATS
    if not configured(command).repeats or not is_repeated:
        return []
    return [f"{_ROUND}={','.join(map(str, range(1, repeats + 1)))}"]


def _choices(config: DictConfig) -> dict[str, list[str]]:
    """The values of every setting that has several, as typed."""
    # An experiment has its choices in the configuration. Hydra ignores them for a typed setting.
    params = config.hydra.sweeper.get("params") or {}
    texts = [f"{key}={value}" for key, value in params.items()]
    # As typed: what an interpolation stands for may only be known in a job.
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    texts += typed
    # The parser needs the configurations, because `glob(...)` is over them.
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    # Of several overrides of one setting the last counts.
    overrides = {override.key_or_group: override for override in parser.parse_overrides(texts)}
    choices: dict[str, list[str]] = {}
    for setting, override in overrides.items():
        if override.is_sweep_override() and not override.is_interval_sweep():
            # Not Hydra's own texts, which have a backslash before the colon of `./my_method.py:MyMethod`.
            values = [getattr(value, "text", value) for value in override.sweep_iterator()]
            choices[setting] = list(map(str, values))
    return choices
