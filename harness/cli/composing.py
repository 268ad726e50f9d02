"""Uses Hydra to compose configurations from presets and typed settings, and runs a command once or for each sweep job.

Hydra's own `main` would read `sys.argv` and print errors over many lines. `run` therefore does the work of that
function itself, with a few private names of Hydra. Before pyproject.toml allows another release of Hydra, tests/cli
must pass with that release.
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

# How to type a mean acceptance length and its K, for the settings in which users may type rates by position instead,
# such as `0.76,0.62` (`amounts.rates_by_position`).
_TYPED_LENGTHS = {"acceptance": "acceptance={:.3f}@{}", "card": "card={:.3f} K={}"}


@contextmanager
def opened(presets: str | None = None) -> Iterator[Hydra]:
    """Open Hydra with this project's configurations.

    Args:
        presets: a directory with further presets; None if there is none.

    Raises:
        SettingError: the directory does not exist.
    """
    names.register()
    # Hydra then behaves like version 1.3, whichever later version is installed.
    setbase("1.3")
    searched = create_config_search_path(str(CONF))
    if presets is not None:
        if not Path(presets).is_dir():
            raise SettingError("--config-dir", "no such directory", presets)
        # Before Hydra's last entry, `schema`, and so after `conf/`, as with Hydra's own option.
        searched.prepend("command-line", f"file://{Path(presets).resolve()}", "schema")
    GlobalHydra.instance().clear()  # A notebook may have initialised Hydra already.
    try:
        yield Hydra.create_main_hydra2("harness", searched)
    finally:
        GlobalHydra.instance().clear()


def compose(hydra: Hydra, command: str, typed: Typed) -> DictConfig:
    """Return the configuration of a run, or the one with which all jobs of a sweep begin."""
    mode = RunMode.MULTIRUN
    if "multirun" not in typed.options:
        # A preset may make the run a sweep.
        mode = hydra.get_mode(command, typed.settings) or RunMode.RUN
    settings = [*typed.settings, f"hydra.mode={mode.name}"]
    return hydra.compose_config(command, settings, mode, with_log_configuration=True)


def run(command: str, typed: Typed, invocation: Invocation) -> str:
    """Run a command once, or for each job of a sweep.

    Returns:
        The text to print: the configuration for `--cfg`, the list of jobs for `dry_run=true`, otherwise "".

    Errors of the run itself, or of the jobs, are collected in `invocation`. With HYDRA_FULL_ERROR=1 every error is
    raised, as it was.

    Raises:
        SettingError: the words cannot be understood, the command cannot do what they ask for, or the run's directory
            cannot be used. With `dry_run=true` also: a setting of a job is wrong, or a file is missing.
        RunError: the disk is full or fails when the run's directory is made, or a file of a sweep cannot be written.
        BrokenPipeError: stdout was closed.
        KeyboardInterrupt: the run was interrupted.
    """
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
        if options.get("dry_run") == "true":
            from harness.cli import sweep

            return sweep.preview(config, hydra.config_loader, invocation.servers)
        callbacks = Callbacks(config)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
        about: Any = {"config": config, "config_name": command}
        # Locks the run's directory, and removes it if nothing was measured.
        with claimed(config):
            if is_sweep:
                callbacks.on_multirun_start(**about)
                _sweep(command, config, context, invocation)
                callbacks.on_multirun_end(**about)
            else:
                callbacks.on_run_start(**about)
                job = run_job(invocation, config, "hydra.run.dir", None, context)
                callbacks.on_run_end(**about, job_return=job)
                # Reading `return_value` raises an error that `invocation` did not collect, if there was one.
                _ = job.return_value
        return ""


def _sweep(command: str, config: DictConfig, context: HydraContext, invocation: Invocation) -> None:
    """Run the jobs of a sweep, and print its table even if an error or a signal ends it early."""
    from harness.cli import sweep

    manifest, jobs = sweep.begin(command, config, context.config_loader)
    is_interrupted = False
    try:
        with invocation.reporting(), explaining(command):
            launcher = Plugins.instance().instantiate_launcher(
                config=config, hydra_context=context, task_function=invocation
            )
            # Hydra's limit to the jobs that are launched together; None for no limit.
            at_once = config.hydra.sweeper.get("max_batch_size") or len(jobs)
            for first in range(0, len(jobs), at_once):
                ended = launcher.launch(jobs[first : first + at_once], initial_job_idx=first)
                # Reading `return_value` raises an error that `invocation` did not collect, such as that of a launcher
                # whose process died.
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
    """Turn errors that Hydra raises within the block for a user's mistake into our own errors, unless a traceback was
    asked for. All other errors are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        mistake = _explained(error, command)
        if mistake is None or WANTS_TRACEBACK:
            raise
        raise mistake from error


def _explained(error: Exception, command: str) -> Exception | None:
    """Return an error whose message has one line; None if the error is not a mistake of the user.

    Some errors are recognised by their class. Others are recognised by their message; a comment shows an example. The
    order of the conditions matters: the last condition matches all other errors of Hydra.
    """
    text = str(error)
    # Hydra reports a missing preset by an OSError that has no number. EPIPE is the error of a closed stdout. Any other
    # OSError is taken for one about the run's directory, even if the file that cannot be read is a preset.
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
        # For `model=7C` the missing file is `model/7C`. An error without a group is for the conditions below.
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if group:
            return _no_such_preset(error, command, group, choice)
    # YAML's error in a preset: "while parsing a flow sequence\n  in \"mine.yaml\", line 2, column 3".
    if (mark := getattr(error, "problem_mark", None)) is not None:
        place = f"{mark.name}, line {mark.line + 1}"
        return SettingError(place, f"is not valid YAML ({text.splitlines()[0]})")
    # "Ambiguous value for argument 'draft=lookup,tiny_draft'"
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        hint = conversion.setting_hints(configured(command).settings).get(several[1])
        rule = "has several values: -m measures each"
        if several[1] in _TYPED_LENGTHS:
            rule = rates_by_position(several[2], _TYPED_LENGTHS[several[1]]) or rule
        elif any(typing.get_origin(kind) is tuple for kind in conversion.alternatives(hint)):
            rule = f"must be typed as a list: '{several[1]}=[{several[2]}]'"
        return SettingError(several[1], rule, several[2])
    # "In 'experiment/tiny': Could not override 'prompts'. No match in the defaults list."
    absent = re.search(r"Could not override '(\w+)'\. No match", text)
    if absent and (rule := whose_setting(absent[1])):
        return SettingError(absent[1], rule)
    # Python's own "range() arg 3 must not be zero", or "Config group override must be a string or a list", which
    # `draft=lookup,null` causes.
    if isinstance(error, errors.HydraException) or text.startswith(("range() ", "Config group ")):
        messages = [text.split("\n\n")[0], *str(error.__cause__ or "").splitlines()[:1]]
        in_one_line = [" ".join(message.split()) for message in messages if message]
        return SettingError("settings", ": ".join(in_one_line))
    return None


def _no_such_preset(
    error: errors.MissingConfigException, command: str, group: str, choice: str
) -> SettingError:
    """Return the error for a missing preset: `model=7C: no such preset (did you mean 7B?); harness help presets
    lists them`.
    """
    if group == "hydra/launcher":
        installing = f"{install_command('ray,slurm')} brings the launchers of ray and submitit"
        if choice == "joblib":
            installing = "pip install hydra-joblib-launcher brings it"
        there = ", ".join(error.options or ())
        return SettingError(group, f"is not installed, only {there}; {installing}", choice)
    # Hydra lists no alternatives if the missing preset is the base of a name with suffixes: `7C` for `7C_8bit`.
    known = list(error.options or names.presets(group))
    # A draft may be named like any model. Hydra then reports "In 'draft/tiny_draf': Could not find 'model/tiny_draf'".
    if group == "model" and str(error).startswith("In 'draft"):
        group = "draft"
        known += names.drafts()
    if instead := INSTEAD.get(f"{group}={choice}"):
        return SettingError(group, instead, choice)
    listed = f"there are: {', '.join(known)}"
    if len(known) > 12:
        listed = "harness help presets lists them"
    # For `7B_9bit` suggest the valid suffixes of the preset that exists.
    base = choice.rpartition("_")[0]
    if base in known:
        known += [f"{base}_8bit", f"{base}_4bit"]
    if group in ("model", "draft", "prompts"):
        listed += f"; a path is typed with a slash, ./{choice}"
    return SettingError(group, f"no such preset{nearest(choice, known)}; {listed}", choice)
