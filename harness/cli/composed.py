"""From a configuration that Hydra composed to settings, and to a run or one job of a sweep."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from harness.cli import signals
from harness.cli.manifest import Manifest
from harness.cli.menu import conversion, server_words
from harness.cli.menu.names import method_name
from harness.commands.command import ConfiguredCommand, Service
from harness.commands.registry import configured
from harness.config.engines import check_settings_have_no_key
from harness.config.errors import SettingError
from harness.config.installation import is_installed, require_local
from harness.config.machine import share_cores
from harness.config.methods import METHODS
from harness.config.model_names import SERVED
from harness.config.repositories import check_place
from harness.config.run import PromptedSettings, RepeatedSettings, RunSettings
from harness.engines.registry import ENGINES, engine_of
from harness.measuring.progress import note
from harness.measuring.prompts.sets import load_prompts
from harness.results.files import SUMMARY_FILE
from harness.results.locked_files import remove_locks


def run(config: Any, servers: Sequence[Sequence[str]]) -> Sequence[Any]:
    """Run a command, or its job of a sweep, and return its rows.

    Args:
        config: the configuration that Hydra composed, with the command's name as `command`.
        servers: the commands behind `--`.

    Raises:
        HarnessError: a setting is wrong, or the run failed.
    """
    try:
        return _run(config, servers)
    except SettingError:
        hydra = HydraConfig.get()
        if not is_sweep():
            _remove_unused(Path(hydra.runtime.output_dir), Path(hydra.run.dir))
        raise


def is_sweep() -> bool:
    """Whether what Hydra composes is a job of a sweep."""
    return HydraConfig.get().mode is RunMode.MULTIRUN


def _sweep_directory() -> Path | None:
    hydra = HydraConfig.get()
    return Path(hydra.runtime.cwd, hydra.sweep.dir) if is_sweep() else None


def checked(
    config: Any, servers: Sequence[Sequence[str]]
) -> tuple[ConfiguredCommand[Any], RunSettings]:
    """The command and its settings, see `run`."""
    plain = _resolved(config)
    command = configured(plain.pop("command"))
    server_words.attach(servers, plain)
    sweep = _sweep_directory()
    manifest = None if sweep is None else Manifest.read(sweep)
    settings = _settings(command, plain, manifest)
    _check_machine(command, settings)
    return command, settings


def label() -> str:
    """The settings that were typed for what Hydra composes."""
    return " ".join(HydraConfig.get().overrides.task)


def _remove_unused(directory: Path, typed: Path) -> None:
    """Remove what a run that measured nothing has written; Hydra makes its directory before settings are checked.

    Args:
        typed: the same as it is set; of a relative path empty parents go, too.
    """
    if (directory / SUMMARY_FILE).exists():
        return
    # What is logged later in this process must not look for the file there.
    for logger in (logging.getLogger(), logging.getLogger("harness")):
        for handler in list(logger.handlers):
            file = getattr(handler, "baseFilename", None)
            if file is not None and Path(file).is_relative_to(directory.absolute()):
                logger.removeHandler(handler)
                handler.close()
    for name in ("log.txt", "environment.json"):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / ".hydra", ignore_errors=True)
    remove_locks(directory)
    if directory == Path.cwd():
        return
    with suppress(OSError):
        directory.rmdir()
        for parent in [] if typed.is_absolute() else typed.parents[:-1]:
            parent.rmdir()


def _run(config: Any, servers: Sequence[Sequence[str]]) -> Sequence[Any]:
    """Run a command, see `run`."""
    command, settings = checked(config, servers)
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    sweep = _sweep_directory()
    if sweep is None:
        # A job of a sweep is refused alone, and leaves a row.
        _require_files(settings)
        _note_imports(command, settings)
    # Slow to import: only for settings that are right.
    from harness.cli import jobs

    # A signal that came during the imports so far.
    signals.raise_postponed()
    if sweep is None:
        if isinstance(command, Service):
            signals.load(command.program).run(settings, signals.leaving)
            return []
        return jobs.Job(command.name, settings, directory).run()
    if not command.sweeps:
        raise SettingError("-m", f"{command.name} has no sweeps")
    # Jobs of submitit's `LocalLauncher` run side by side here, `max_batch_size` at once. Ray limits the
    # threads of its jobs itself; Hydra's own launcher runs one after the other.
    is_side_by_side = "LocalLauncher" in hydra.launcher._target_
    jobs_at_once = hydra.sweeper.get("max_batch_size") or 1 if is_side_by_side else 1
    share_cores(jobs_at_once)
    overrides = tuple(hydra.overrides.task)
    number = int(hydra.job.num)
    return jobs.run_job(jobs.Job(command.name, settings, directory, sweep, number, overrides))


def _resolved(config: Any) -> dict[str, Any]:
    """The composed configuration as dictionaries and lists.

    Raises:
        SettingError: a value is missing, cannot be looked up, or has a key in it.
    """
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise SettingError(str(error.full_key), "must be set") from error
    except OmegaConfBaseException as error:
        raise SettingError(str(error.full_key or "settings"), str(error).splitlines()[0]) from error
    # Presets and `${oc.env:NAME}` may have brought one.
    checked = json.loads(json.dumps(plain))
    prompts = checked.get("prompts") or {}
    texts = [f"prompt={checked.pop('prompt', '')}"]
    texts += [f"prompts.{name}={prompts.pop(name, '')}" for name in ("system", "template")]
    check_settings_have_no_key([json.dumps(checked, ensure_ascii=False), *texts])
    return cast(dict[str, Any], plain)


def _check_machine(command: ConfiguredCommand[Any], settings: RunSettings) -> None:
    """Raise a SettingError where a package is missing that the command, its engine or its models need."""
    if command.needs_local(settings):
        require_local(command.name)
    elif command.measures:
        engine_of(settings).check_installed()
    command.check_installed()


def _note_imports(command: ConfiguredCommand[Any], settings: RunSettings) -> None:
    """Show what is going to be measured, before libraries are imported that take seconds."""
    is_known = settings.model.repository != SERVED and command.uses_models(settings)
    if not is_known or not is_installed("transformers") or "torch" in sys.modules:
        return
    draft = "" if settings.draft is None else f" with draft {settings.draft.name}"
    computes_here = engine_of(settings).computes_here
    libraries = "torch and transformers" if computes_here else "transformers"
    note(f"{settings.model.name}{draft}: importing {libraries}")


def _settings(
    command: ConfiguredCommand[Any], plain: dict[str, Any], manifest: Manifest | None
) -> RunSettings:
    """Typed settings.

    Args:
        plain: the composed configuration as dictionaries and lists; changed here.
        manifest: of the sweep that the job belongs to.

    Raises:
        SettingError: a value breaks a rule.
    """
    if manifest is not None:
        # `-m draft=lookup,tiny draft.max_ngram=2`: a job leaves out what only other jobs' methods or engines have.
        choices = manifest.choices
        # `pair=7B+lookup` sets both models.
        pair_drafts = [pair.partition("+")[2] for pair in choices.get("pair", ())]
        methods = {method_name(draft) for draft in [*choices.get("draft", ()), *pair_drafts]}
        plain["draft"] = METHODS.without_others(plain["draft"], methods)
        plain["engine"] = ENGINES.without_others(plain["engine"], choices.get("engine", ()))
    settings = conversion.from_config(command.settings, plain)
    if manifest is None:
        limit = settings.job_timeout_s
        if limit is not None:
            raise SettingError("job_timeout_s", "needs -m: it ends jobs of a sweep", limit)
    elif settings.engine.url is not None:
        for name in manifest.choices:
            if name in ("draft", "decoding.num_draft_tokens") or name.startswith("draft."):
                rule = (
                    f"cannot vary with engine={settings.engine.name}: how a server drafts is set "
                    "when it starts, so that all jobs would measure the same"
                )
                raise SettingError(name, rule)
    # If typed as `manifest.round_overrides` reads it, it is a sweep over `repeat` by now.
    repeats = settings.repeats if isinstance(settings, RepeatedSettings) else 1
    if repeats > 1 and (manifest is None or not manifest.is_repeated):
        raise SettingError("repeats", "must be typed as repeats=NUMBER", repeats)
    return settings


def _require_files(settings: RunSettings) -> None:
    """Raise a SettingError for the directory of a model or a file of prompts that is not there, before anything is
    imported that takes seconds.
    """
    if engine_of(settings).computes_here:
        for role, model in settings.models.items():
            is_built_here = settings.weights == "random" and model.architecture is not None
            if not is_built_here:
                check_place(role, model.repository)
    if not isinstance(settings, PromptedSettings) or settings.prompts.repository is not None:
        return
    prompts = settings.prompts
    if not all(Path(file).expanduser().exists() for file in prompts.files):
        load_prompts(prompts)
