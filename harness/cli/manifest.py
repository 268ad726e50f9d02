"""The files in a sweep's directory: `sweep.json`, which lists what is varied, and a CSV file with the jobs' rows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from harness.cli.names import method_name
from harness.cli.typed import ROUND, SERVER
from harness.commands.command import Command
from harness.commands.registry import configured
from harness.config.command_line import check_settings_have_no_key
from harness.config.engines import EngineSettings
from harness.config.errors import SettingError
from harness.config.methods import METHODS
from harness.engines.record import ENGINES
from harness.measuring.measurement import OF_THE_DRAFT
from harness.results.files import append_rows, as_csv, rows_in
from harness.results.locked_files import LOCKS, locked, replace_file
from harness.results.schema import RunRow

_FILE = "sweep.json"
# The files and directories that a run or a sweep makes even if nothing is measured.
_UNUSED = {"log.txt", "environment.json", "multirun.yaml", ".hydra", LOCKS, _FILE}
# The most jobs of a sweep. A job takes seconds at least, so a larger sweep would take hours and is probably a mistake.
_MOST_JOBS = 10_000


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Facts about all jobs of a sweep.

    Attributes:
        choices: for each setting in which jobs differ, its different values as text. The setting that varies slowest
            comes first: `{"draft": ["lookup", "tiny_draft"], "seed": ["1", "2"]}`.
        num_jobs: number of jobs, in all rounds together.
    """

    choices: dict[str, list[str]]
    num_jobs: int

    @property
    def jobs_per_round(self) -> int:
        """The number of jobs without repeats; without rounds it is `num_jobs`."""
        return self.num_jobs // len(self.choices.get(ROUND, [""]))

    @classmethod
    def of(cls, config: DictConfig, loader: ConfigLoader) -> Manifest:
        """Return the manifest of a sweep that Hydra composed. Its number of jobs is that of all combinations, which
        `jobs` may reduce.

        Every job is to run once before any job runs again, so that drift of the machine affects all jobs alike.
        Therefore `repeat` is made the setting that varies slowest, also in `config`.

        Raises:
            SettingError: there are too many jobs.
        """
        choices: dict[str, list[str]] = {}
        for override in overrides_of(config, loader):
            # An interval of real numbers has no list of values; it is for optimisers, and Hydra refuses it later.
            if override.is_sweep_override() and not override.is_interval_sweep():
                values = [*itertools.islice(override.sweep_iterator(), _MOST_JOBS + 1)]
                # A value in quotes has its text in an attribute. Jobs with equal values run once.
                texts = [str(getattr(value, "text", value)) for value in values]
                choices[override.key_or_group] = [*dict.fromkeys(texts)]
        num_jobs = math.prod(map(len, choices.values()))
        if num_jobs > _MOST_JOBS:
            raise SettingError("-m", f"makes more than {_MOST_JOBS:,} jobs: divide the sweep")
        if ROUND in choices:
            # Hydra varies the choices in `sweeper.params` (an experiment's) more slowly than typed choices. So `repeat`
            # is put first in `params`.
            choices = {ROUND: choices.pop(ROUND), **choices}
            params = config.hydra.sweeper.get("params") or {}
            with read_write(config.hydra):
                config.hydra.sweeper.params = {ROUND: ",".join(choices[ROUND]), **params}
        return cls(choices, num_jobs)

    def jobs(self, config: DictConfig, loader: ConfigLoader) -> Iterator[tuple[list[str], Any]]:
        """Yield the overrides of each job, and its configuration.

        Settings that have no effect in a job are left out of its overrides, and jobs that are then equal become one:
        `draft=lookup,none K=2,4` makes the three jobs `draft=lookup K=2`, `draft=lookup K=4` and `draft=none`.

        Raises:
            SettingError, or one of Hydra's errors: there are no jobs, or a job cannot be composed.
        """
        # For each combination of the choices, its overrides: [["draft=lookup", "K=2"], ["draft=lookup", "K=4"], ...].
        (product,) = BasicSweeper.split_arguments(overrides_of(config, loader), None)
        if not product:
            rule = "there are no jobs, because glob(...) matches no preset"
            raise SettingError("-m", f"{rule}; directories are listed, with commas between them")
        earlier = set()
        for overrides in product:
            composed = loader.load_sweep_config(config, overrides)
            groups: dict[str, Any] = {
                name: OmegaConf.to_container(composed[name])
                for name in ("draft", "engine", "decoding")
            }
            self.leave_out(groups)
            # Without a draft, K has no effect, except in the commands of servers, which may contain {K} in either arm.
            if groups["draft"]["name"] == "none" and groups["engine"]["name"] != "server":
                for name in OF_THE_DRAFT:
                    groups["decoding"].pop(name, None)
            # Drop the choices of settings that were left out above: `draft.max_ngram=3` if the group `draft` has no
            # `max_ngram` any more. These stay: what is not varied, the choice of a whole group (`draft=tiny`), and
            # settings that the group still has.
            kept = []
            for override in overrides:
                key = override.lstrip("+").partition("=")[0]
                group, *names = key.split(".")
                is_fixed = key not in self.choices or group not in groups
                if is_fixed or not names or names[0] in groups[group]:
                    kept.append(override)
            if tuple(kept) not in earlier:
                earlier.add(tuple(kept))
                yield kept, composed

    def leave_out(self, groups: dict[str, Any]) -> None:
        """Remove from a job's configuration, in place, the settings that only drafts or engines of other jobs use.

        With `-m draft=lookup,tiny draft.max_ngram=2` the job of `tiny` gets no `draft.max_ngram`. A job with
        `draft=none` counts as one with a model, so it keeps the settings of models, which are refused later.

        Args:
            groups: the configuration, with at least the groups `draft` and `engine`.

        Raises:
            SettingError: a draft or an engine does not exist, or cannot be loaded.
        """
        # `pair=7B+lookup` chooses the target and the draft.
        pair_drafts = [pair.partition("+")[2] for pair in self.choices.get("pair", ())]
        methods = {method_name(draft) for draft in [*self.choices.get("draft", ()), *pair_drafts]}
        groups["draft"] = METHODS.without_others(groups["draft"], methods)
        groups["engine"] = ENGINES.without_others(groups["engine"], self.choices.get("engine", ()))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Return the manifest of the sweep in a directory."""
        return cls(**json.loads((directory / _FILE).read_text(encoding="utf-8")))

    def write(self, directory: Path) -> None:
        """Write the manifest into the sweep's directory, which is made if it does not exist.

        Raises:
            SettingError: the directory contains a sweep with other choices.
            RunError: writing fails.
        """
        file = directory / _FILE
        if file.exists() and self.read(directory).choices != self.choices:
            raise SettingError(
                "hydra.sweep.dir", "contains another sweep: name a new directory", str(directory)
            )
        replace_file(file, json.dumps(dataclasses.asdict(self)).encode())

    def label(self, overrides: Sequence[str], engine: EngineSettings) -> str:
        """Return the overrides in which a job differs from other jobs, in short: `draft=lookup K=4`.

        Args:
            overrides: all overrides of the job.
            engine: the settings of the job's engine. With three or more commands after `--`, its `start_command` is
                the one that this job compares with the first one.
        """
        differing = []
        for override in overrides:
            key = override.lstrip("+").partition("=")[0]
            if key == SERVER:
                differing.append(f"-- {shlex.join(vars(engine)['start_command'])}")
            elif key in self.choices:
                differing.append(override)
        label = " ".join(differing)
        # Hydra's texts have a backslash before the colon of `./my_method.py:MyMethod`.
        for hidden, shown in (
            ("decoding.num_draft_tokens=", "K="),
            ("engine.vary.", ""),
            ("\\:", ":"),
        ):
            label = label.replace(hidden, shown)
        return label


def overrides_of(config: DictConfig, loader: ConfigLoader) -> list[Override]:
    """Return the settings of a sweep: first those of an experiment, then the typed ones. If a setting occurs several
    times, only its last value is returned.
    """
    # An experiment's choices are in `params`. Hydra, too, ignores such a choice if the setting is also typed.
    params = config.hydra.sweeper.get("params") or {}
    texts = [f"{key}={value}" for key, value in params.items()]
    # Unresolved, because the value of an interpolation may only be known within a job.
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    # The parser needs the configurations, because `glob(...)` selects among them.
    parsed = OverridesParser.create(loader).parse_overrides([*texts, *typed])
    return [*{override.key_or_group: override for override in parsed}.values()]


def results_file(config: DictConfig) -> str | None:
    """Return the file that collects the rows of all runs: the value of `results.file`.

    None if the value is null, or if it can only be resolved within a job, such as `results/${oc.env:SLURM_JOB_ID}.csv`:
    then each job has its own file.
    """
    try:
        file: str | None = OmegaConf.select(config, "results.file")
    except OmegaConfBaseException:
        return None
    return file


class SweepFile:
    """`multirun/…/latency.csv`: one set of rows for each job of a sweep that was not refused, however it ended.

    A launcher may run jobs in several processes. Each job writes its rows to this file, and reads the rows of other
    jobs. Two columns tell the kinds of rows apart:

        row of                                    job                      repeat
        a job                                     the number of the job    its round, if jobs are repeated
        several repeats of a job, pooled          None                     all
        a run whose `results.file` is this file   None                     anything else; such rows are left alone

    Args:
        sweep: the sweep's directory.
        kind: the class of the rows.
    """

    def __init__(self, sweep: Path, kind: type[RunRow]) -> None:
        # `kind.kind` is the name of the kind of rows, such as `latency`.
        self.path = sweep / f"{kind.kind}.csv"
        self._kind = kind

    def job_rows(self) -> list[RunRow]:
        """Return the rows of all jobs that have ended."""
        return [row for row in rows_in(self.path, self._kind) if row.job is not None]

    def put(self, job: int, rows: Sequence[RunRow]) -> list[RunRow]:
        """Put the rows of a job into the file, in place of the rows that the file has for this job, if any.

        Returns:
            The rows of all jobs that have ended.

        Raises:
            RunError: writing fails.
        """
        number = str(job)
        new = [dataclasses.replace(row, job=number) for row in rows]
        kept = self._replaced(lambda row: row.job != number, new)
        return [row for row in kept if row.job is not None]

    def remove_jobs(self) -> None:
        """Remove the rows that an earlier sweep wrote here. They remain in the directories of its jobs.

        Raises:
            RunError: writing fails.
        """
        if self.path.exists():
            # Pooled rows have no job number either.
            self._replaced(lambda row: row.job is None and getattr(row, ROUND, None) != "all")

    def _replaced(self, keep: Callable[[RunRow], bool], new: Sequence[RunRow] = ()) -> list[RunRow]:
        """Keep the file's rows that `keep` accepts, add the new ones, and return all rows of the changed file.

        Raises:
            RunError: writing fails; the file then keeps its old content.
        """
        with locked(self.path) as file:
            rows = [*filter(keep, rows_in(file.path, self._kind)), *new]
            if rows:
                file.replace(as_csv(rows))
            else:
                file.path.unlink(missing_ok=True)
        return rows

    def append_summaries(self, rows: Sequence[Any], collected: str | None) -> None:
        """Append pooled rows to this file and to the file that collects all runs.

        If a sweep is resumed, pooled rows that a file already has (with equal `pooled_runs`) are not appended again.

        Args:
            rows: the pooled rows.
            collected: the file that collects all runs; None if there is none.

        Raises:
            SettingError or RunError: writing fails.
        """
        for path in (self.path, collected):
            if path is None or not rows:
                continue
            known_rows: list[Any] = rows_in(Path(path), self._kind)
            known_runs = [row.pooled_runs for row in known_rows]
            new = [row for row in rows if row.pooled_runs not in known_runs]
            if new:
                append_rows(path, new)


@contextmanager
def claimed(config: DictConfig) -> Iterator[None]:
    """Lock the directory of a run or a sweep against other runs within the block; that of a service is not locked.

    A directory in which nothing was measured is removed at the end, except after an interruption.

    Raises:
        SettingError: the directory cannot be used, for one of these reasons:
            - another run is using it;
            - it contains files already (a sweep may continue in the directory of an earlier sweep);
            - the run's own file of rows would be `results.file`;
            - its name contains a secret key. (A service is only checked for this, because it writes no files.)
        OSError: the directory cannot be made (`composing` explains this error).
    """
    is_sweep = config.hydra.mode is RunMode.MULTIRUN
    setting = "hydra.sweep.dir" if is_sweep else "hydra.run.dir"
    value = OmegaConf.select(config, setting)
    check_settings_have_no_key([f"{setting}={value}"])
    directory = Path(value)
    command = configured(config.command)
    if not isinstance(command, Command):
        yield
        return
    own = SweepFile(directory, command.row).path
    collected = results_file(config)
    # Unlike `Path.resolve`, `realpath` raises no error for a link that leads to itself. `check_appendable` refuses such
    # a link.
    if isinstance(collected, str) and os.path.realpath(own) == os.path.realpath(collected):
        rule = f"must be another directory than that of results.file={collected}, which collects all runs"
        raise SettingError(setting, rule, value)

    def check_unused() -> None:
        """Raise the SettingError if the directory contains files already."""
        names = {*os.listdir(directory)} - {LOCKS} if directory.is_dir() else set()
        # A sweep may be continued in its own directory.
        if names and not (is_sweep and _FILE in names):
            raise SettingError(setting, f"contains {min(names)}: name a new directory", value)

    check_unused()
    lock = directory / LOCKS / "run.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(lock).acquire(timeout=0):
            # Another run may have ended between the first check and the lock.
            check_unused()
            try:
                yield
            except Exception:
                _remove_unused(directory)
                raise
            # After an interruption this is not reached, because a job may still be writing its row.
            _remove_unused(directory)
    except filelock.Timeout:
        raise SettingError(
            setting, "is in use by another run: name a new directory", value
        ) from None


def _remove_unused(directory: Path) -> None:
    """Remove the directory of a run that measured nothing, and empty directories above it, but never the current
    directory. In a sweep's directory, first remove the directories of jobs that measured nothing.

    This is needed because Hydra makes the directories before settings are checked.
    """
    for job in directory.glob("[0-9]*/"):
        _remove_unused(job)
    if _UNUSED.issuperset(os.listdir(directory)) and not directory.samefile("."):
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            # With a relative path, `removedirs` stops at the current directory.
            os.removedirs(os.path.relpath(directory.parent))
