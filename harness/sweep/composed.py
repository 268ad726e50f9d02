"""From a configuration that Hydra composed to settings, and to a run or one job of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.errors import SettingError
from harness.config.machine import share_cores
from harness.config.run import RunSettings
from harness.drafting.registry import METHODS
from harness.engines.registry import ENGINES, engine_of
from harness.menu import conversion
from harness.records.registry import COMMANDS, settings_of
from harness.sweep import ranks, signals
from harness.sweep.manifest import Manifest, collects_in
from harness.sweep.sweep_file import SweepFile

if TYPE_CHECKING:
    from harness.sweep.jobs import Job


def run(config: Any) -> Sequence[Any]:
    """Run a command, or its job of a sweep, and return its rows.

    Args:
        config: the configuration that Hydra composed, with the command's name as `command`.

    Raises:
        HarnessError: a setting is wrong, the run failed, or its answer is not the good one.
    """
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise SettingError(str(error.full_key or "settings"), str(error).splitlines()[0]) from error
    name = plain.pop("command")
    hydra = HydraConfig.get()
    sweep = _sweep_directory(hydra)
    _check_directory(name, OmegaConf.select(config, "results.file"), hydra, sweep)
    settings = _settings(name, plain, sweep)
    if COMMANDS[name].measures:
        engine_of(settings).check_installed()
    if sweep is None:
        _announce(settings)
    # Slow to import: only for settings that are right.
    from harness.sweep.jobs import Job

    # A signal that came during the imports so far.
    signals.raise_postponed()
    directory = Path(hydra.runtime.output_dir)
    if sweep is None:
        return _run_alone(Job(name, settings, directory))
    number = int(hydra.job.num)
    overrides = tuple(hydra.overrides.task)
    settings = settings.of_job(Manifest.read(sweep).differing(overrides))
    return _run_in_sweep(Job(name, settings, directory, sweep, number, overrides), hydra)


def _announce(settings: RunSettings) -> None:
    """Say what is to run, before libraries are imported that take seconds."""
    if "torch" in sys.modules:
        return
    from harness.measuring.progress import say

    draft = "" if settings.draft is None else f" with draft {settings.draft.name}"
    libraries = "torch and transformers" if engine_of(settings).computes_here else "transformers"
    say(f"{settings.model.name}{draft}: importing {libraries}")


def _sweep_directory(hydra: HydraConf) -> Path | None:
    """The directory of the sweep that the job belongs to, without -m None.

    Hydra tells only the job's own directory, which is `hydra.sweep.subdir` below that of the sweep: `0`, or `7B/0`.
    """
    if hydra.mode is not RunMode.MULTIRUN:
        return None
    depth = len(Path(hydra.sweep.subdir).parts)
    return Path(hydra.runtime.output_dir).parents[depth - 1]


def _check_directory(
    command: str, collecting_file: object, hydra: HydraConf, sweep: Path | None
) -> None:
    """Raise a SettingError where the run's or sweep's own rows would go to a file that has other content."""
    kind = COMMANDS[command].row
    if kind is None:
        return
    directory = sweep or Path(hydra.runtime.output_dir)
    setting, typed = "hydra.run.dir", hydra.run.dir
    if sweep is not None:
        setting, typed = "hydra.sweep.dir", hydra.sweep.dir
    rule = "must be another directory than that of"
    if collects_in(directory, kind, collecting_file):
        file = f"results.file={collecting_file}, which collects all runs"
        raise SettingError(setting, f"{rule} {file}", typed)
    # A single run leaves such a file alone, and writes another one.
    if sweep is not None and SweepFile(sweep, kind).is_foreign():
        file = f"your own {kind.kind}.csv, which the sweep would replace"
        raise SettingError(setting, f"{rule} {file}", typed)


def _settings(command: str, plain: dict[str, Any], sweep: Path | None) -> RunSettings:
    """Typed settings.

    Args:
        plain: the composed configuration as dictionaries and lists; changed here.

    Raises:
        SettingError: a value breaks a rule.
    """
    manifest = None if sweep is None else Manifest.read(sweep)
    if manifest is not None:
        # `-m draft=lookup,suffix draft.max_ngram=2`: a job leaves out what only other jobs' methods or engines have.
        plain["draft"] = METHODS.without_others(plain["draft"], manifest.methods)
        plain["engine"] = ENGINES.without_others(plain["engine"], manifest.engines)
    settings = ranks.with_ranks(conversion.from_config(settings_of(COMMANDS[command]), plain))
    if manifest is None:
        limit = settings.job_timeout_s
        if limit is not None:
            raise SettingError("job_timeout_s", "needs -m: it ends jobs of a sweep", limit)
    elif not engine_of(settings).computes_here and not getattr(settings.engine, "starts", False):
        _refuse_labels(manifest.varying, settings.engine.name)
    # Typed in this form, and only then, `sweep.repeats` has made a sweep over `repeat` of it.
    repeats = getattr(settings, "repeats", 1)
    if repeats > 1 and (manifest is None or manifest.num_rounds == 1):
        raise SettingError("repeats", "must be typed as repeats=NUMBER", repeats)
    return settings


def _refuse_labels(varying: Sequence[str], engine: str) -> None:
    """Raise a SettingError for jobs that differ in how a server drafts, which nothing but its start sets."""
    for name in varying:
        if name in ("draft", "decoding.num_draft_tokens") or name.startswith("draft."):
            rule = (
                f"cannot vary with engine={engine}: how a server drafts is set when it starts,"
                " so that all jobs would measure the same"
            )
            raise SettingError(name, rule)


def _run_alone(job: Job) -> Sequence[Any]:
    """Run in this process; in others where several share the models, or where one may crash."""
    from harness.sweep.jobs import run_on_ranks

    command = COMMANDS[job.command]
    num_ranks = _num_ranks(job)
    share_cores(num_ranks)
    if command.row is None:
        signals.load(command.module).run(job.settings, signals.leaving)
        return []
    may_crash = engine_of(job.settings).may_crash and command.sweeps and command.measures
    if num_ranks > 1 or may_crash:
        return run_on_ranks(job, num_ranks)
    return job.run()


def _run_in_sweep(job: Job, hydra: HydraConf) -> Sequence[Any]:
    """Run a job in a worker of this process, or take over its earlier rows."""
    from harness.sweep.jobs import run_job

    command = COMMANDS[job.command]
    if not command.sweeps:
        raise SettingError("-m", f"{job.command} has no sweeps")
    # joblib and Ray limit the threads of their jobs themselves.
    jobs_at_once = None
    if "LocalLauncher" in hydra.launcher._target_:
        jobs_at_once = hydra.sweeper.get("max_batch_size")
    share_cores(_num_ranks(job) * (jobs_at_once or 1))
    return run_job(job)


def _num_ranks(job: Job) -> int:
    return ranks.num_ranks(job.settings) if COMMANDS[job.command].measures else 1
