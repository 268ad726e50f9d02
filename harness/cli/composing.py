"""Hydra: composes configurations from presets and typed settings, and runs a command once or for each job of a sweep.

Hydra's own `main` would read `sys.argv`, and print errors over many lines. So `run` does what it does, with a few
private names of Hydra: a release in the range of pyproject.toml must pass tests/cli.
"""

from __future__ import annotations

import errno
import io
import re
import typing
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from hydra import errors
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from hydra.version import setbase
from omegaconf import DictConfig

from harness.cli import conversion, names
from harness.cli.invocation import WANTS_TRACEBACK, Invocation
from harness.cli.manifest import claimed
from harness.cli.typed import Typed
from harness.commands.registry import configured, whose_setting
from harness.config.amounts import rates_by_position
from harness.config.command_line import INSTEAD
from harness.config.errors import RunError, SettingError, nearest
from harness.config.installation import CONF, install_command
from harness.results.locked_files import DISK_ERRORS

# Settings of an acceptance, and how a length with its K is typed in place of rates by position.
_LENGTHS = {"acceptance": "acceptance={:.3f}@{}", "card": "card={:.3f} K={}"}


@contextmanager
def opened(presets: str | None = None) -> Iterator[Hydra]:
    """Hydra with our menu.

    Args:
        presets: a directory with more presets; None for none.
    """
    names.register()
    setbase("1.3")
    searched = create_config_search_path(str(CONF))
    if presets is not None:
        if not Path(presets).is_dir():
            raise SettingError("--config-dir", "no such directory", presets)
        searched.prepend("command-line", f"file://{Path(presets).resolve()}", "schema")
    GlobalHydra.instance().clear()  # In a notebook there may be one.
    try:
        yield Hydra.create_main_hydra2("harness", searched)
    finally:
        GlobalHydra.instance().clear()


def compose(hydra: Hydra, command: str, typed: Typed) -> DictConfig:
    """The configuration of a run, or the one that all jobs of a sweep begin with."""
    mode = RunMode.MULTIRUN
    if "multirun" not in typed.options:
        # A preset may make it a sweep.
        mode = hydra.get_mode(command, typed.settings) or RunMode.RUN
    settings = [*typed.settings, f"hydra.mode={mode.name}"]
    return hydra.compose_config(command, settings, mode, with_log_configuration=True)


def run(command: str, typed: Typed, invocation: Invocation) -> str:
    """Run a command once, or for each job of a sweep; or return what `--cfg` and `dry_run=true` ask for."""
    options = typed.options
    with explaining(command), opened(options.get("presets")) as hydra:
        if "cfg" in options:
            with redirect_stdout(io.StringIO()) as text:
                hydra.show_cfg(command, typed.settings, options["cfg"], package=None)
            return text.getvalue().rstrip()
        config = compose(hydra, command, typed)
        is_sweep = config.hydra.mode is RunMode.MULTIRUN
        if is_sweep and not configured(command).sweeps:
            raise SettingError("-m", f"{command} has no sweeps: leave it out")
        if not is_sweep and config.hydra.runtime.choices["hydra/launcher"] != "basic":
            raise SettingError("+launcher", "starts the jobs of a sweep: type -m, also for one job")
        if "dry_run" in options:
            from harness.cli import sweep

            return sweep.preview(config, hydra.config_loader, invocation.servers)
        callbacks = Callbacks(config)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
        about: Any = {"config": config, "config_name": command}
        with claimed(config):
            if is_sweep:
                callbacks.on_multirun_start(**about)
                _sweep(command, config, context, invocation)
                callbacks.on_multirun_end(**about)
                return ""
            callbacks.on_run_start(**about)
            job = run_job(invocation, config, "hydra.run.dir", None, context)
            callbacks.on_run_end(**about, job_return=job)
            # Raises what the job has raised.
            return str(job.return_value or "")


def _sweep(command: str, config: DictConfig, context: HydraContext, invocation: Invocation) -> None:
    """Run the jobs of a sweep, and print its table, however it ends."""
    from harness.cli import sweep

    manifest, jobs = sweep.begin(command, config, context.config_loader)
    is_interrupted = False
    try:
        with invocation.reporting(), explaining(command):
            launcher = Plugins.instance().instantiate_launcher(
                config=config, hydra_context=context, task_function=invocation
            )
            at_once = config.hydra.sweeper.get("max_batch_size") or len(jobs)
            for first in range(0, len(jobs), at_once):
                ended = launcher.launch(jobs[first : first + at_once], initial_job_idx=first)
                # Raises what a job has raised.
                _ = [job.return_value for job in ended]
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        is_refused = any(isinstance(error, SettingError) for error in invocation.errors)
        with invocation.reporting():
            invocation.rows, code = sweep.finish(
                command,
                config,
                manifest,
                is_refused=is_refused,
                is_interrupted=is_interrupted,
            )
            invocation.exit_codes.append(code)


# Hydra's errors in one line -------------------------------------------------------------------------


@contextmanager
def explaining(command: str) -> Iterator[None]:
    """Raise mistakes that Hydra finds in the block as our own errors."""
    try:
        yield
    except Exception as error:
        mistake = _explained(error, command)
        if mistake is None or WANTS_TRACEBACK:
            raise
        raise mistake from error


def _explained(error: Exception, command: str) -> Exception | None:
    """The mistake in one line; None for an error that is no mistake in the overrides.

    Some errors are recognised by their class, others by their message; an example is beside each.
    """
    text = str(error)
    # Hydra's error about a missing preset is an OSError without a number.
    if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
        if error.errno in DISK_ERRORS:
            return RunError(f"the run's directory cannot be made: {error.strerror}")
        reason = f"cannot be made ({error.strerror}): name another, and results.file too if it is in the same place"
        value = [error.filename] if error.filename else []
        return SettingError("hydra.run.dir (hydra.sweep.dir with -m)", reason, *value)
    if isinstance(error, errors.OverrideParseException):
        rule = "cannot be read as setting=value; put quotes around spaces, commas and brackets"
        return SettingError(str(error.override), rule)
    if isinstance(error, errors.MissingConfigException):
        # `model=7C`: the missing file is `model/7C`. Without a group it is a file of our own, see below.
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if group:
            return _no_such_preset(error, command, group, choice)
    # What yaml says of a preset: "while parsing a flow sequence\n  in \"mine.yaml\", line 2, column 3"
    if (mark := getattr(error, "problem_mark", None)) is not None:
        place = f"{mark.name}, line {mark.line + 1}"
        return SettingError(place, f"is no YAML ({text.splitlines()[0]})")
    # "Ambiguous value for argument 'draft=lookup,tiny_draft'"
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        hint = conversion.setting_hints(configured(command).settings).get(several[1])
        rule = "has several values: -m measures each"
        if several[1] in _LENGTHS:
            rule = rates_by_position(several[2], _LENGTHS[several[1]]) or rule
        elif any(typing.get_origin(kind) is tuple for kind in conversion.alternatives(hint)):
            rule = f"must be typed as a list: '{several[1]}=[{several[2]}]'"
        return SettingError(several[1], rule, several[2])
    # "In 'experiment/tiny': Could not override 'prompts'. No match in the defaults list."
    absent = re.search(r"Could not override '(\w+)'\. No match", text)
    if absent and (rule := whose_setting(absent[1])):
        return SettingError(absent[1], rule)
    # "range() arg 3 must not be zero", which is Python's own,
    # or "Config group override must be a string or a list", of `draft=lookup,null`.
    if isinstance(error, errors.HydraException) or text.startswith(("range() ", "Config group ")):
        messages = [text.split("\n\n")[0], *str(error.__cause__ or "").splitlines()[:1]]
        in_one_line = [" ".join(message.split()) for message in messages if message]
        return SettingError("settings", ": ".join(in_one_line))
    return None


def _no_such_preset(
    error: errors.MissingConfigException, command: str, group: str, choice: str
) -> SettingError:
    """`model=7C: no such preset (did you mean 7B?); harness help presets lists them`."""
    if group == "hydra/launcher":
        installing = f"{install_command('ray,slurm')} brings the launchers of ray and submitit"
        there = ", ".join(error.options or ())
        return SettingError(group, f"is not installed, only {there}; {installing}", choice)
    # Hydra lists no presets where the missing one is that of a name with suffixes, `7C` of `7C_8bit`.
    known = list(error.options or names.presets(group))
    # A draft's name may be that of any model: "In 'draft/tiny_draf': Could not find 'model/tiny_draf'".
    if group == "model" and str(error).startswith("In 'draft"):
        group = "draft"
        known += names.drafts()
    if instead := INSTEAD.get(f"{group}={choice}"):
        return SettingError(group, instead, choice)
    listed = f"there are: {', '.join(known)}"
    if len(known) > 12:
        listed = "harness help presets lists them"
    # `7B_9bit`: the suffixes of a preset that exists.
    base = choice.rpartition("_")[0]
    if base in known:
        known += [f"{base}_8bit", f"{base}_4bit"]
    if group in ("model", "draft", "prompts"):
        listed += f"; a path is typed with a slash, ./{choice}"
    return SettingError(group, f"no such preset{nearest(choice, known)}; {listed}", choice)
