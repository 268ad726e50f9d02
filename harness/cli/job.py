"""Turns a configuration that Hydra composed into settings, and runs a command that is not part of a sweep."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from harness.cli import conversion, signals
from harness.cli.manifest import Manifest
from harness.cli.typed import ROUND, SERVER
from harness.cli.worker import Job
from harness.commands.command import ConfiguredCommand, Service
from harness.commands.registry import configured, measurement
from harness.config.command_line import check_settings_have_no_key
from harness.config.errors import SettingError, VerdictError
from harness.config.installation import require_local
from harness.config.repositories import check_place
from harness.config.run import PromptedSettings, RunSettings
from harness.engines.record import engine_of
from harness.measuring.prompts.sets import load_prompts

Servers = Sequence[Sequence[str]]


def run(config: Any, servers: Servers) -> tuple[Sequence[Any], VerdictError | None]:
    """Run a command that is not part of a sweep.

    Args:
        config: the configuration that Hydra composed, with the command's name as `command`.
        servers: the commands after `--`.

    Returns:
        The run's rows, empty for a service; and the error that states its bad or doubtful answer, or None if the answer
        is good.

    Raises:
        HarnessError: a setting is wrong, or the run failed.
        KeyboardInterrupt: the run was interrupted.
    """
    command, settings = settings_of(config, servers, manifest=None)
    check_machine(command, settings)
    # A sweep that measures skips this: there, a job whose files are missing fails when it runs.
    require_files(settings)
    # Raise a signal that arrived during the imports up to here.
    signals.raise_postponed()
    if isinstance(command, Service):
        signals.load(command.program).run(settings, signals.leaving)
        return [], None
    rows = Job(command.name, settings, Path(HydraConfig.get().runtime.output_dir)).run()
    return rows, measurement(command.name).bad_answer(rows) if rows else None


def settings_of(
    config: Any, servers: Servers, manifest: Manifest | None
) -> tuple[ConfiguredCommand[Any], RunSettings]:
    """Return the command and its settings. `config` and `servers` are as for `run`.

    Args:
        manifest: the manifest of the sweep that the job belongs to; None for a single run.

    Raises:
        SettingError: a setting is wrong.
    """
    plain = _resolved(config)
    command = configured(plain.pop("command"))
    put_servers(servers, plain)
    choices = {} if manifest is None else manifest.choices
    if manifest is not None:
        manifest.leave_out(plain)
    settings = conversion.from_config(command.settings, plain)
    limit = settings.job_timeout_s
    if manifest is None and limit is not None:
        raise SettingError("job_timeout_s", "needs -m: it ends jobs of a sweep", limit)
    # Only a server that was already running has an address here. No job can give it another draft or K.
    if settings.engine.url is not None:
        for name in choices:
            if name in ("pair", "draft", "decoding.num_draft_tokens") or name.startswith("draft."):
                rule = (
                    f"cannot vary with engine={settings.engine.name}, which drafts as its command says: write {{K}} in"
                    " a command after --"
                )
                raise SettingError(name, rule)
    # `typed.read` turns repeats=5 on the command line into a sweep over `repeat`. Without such a sweep, the number was
    # set in another way, such as by a preset. Some commands have no such setting.
    repeats = getattr(settings, "repeats", 1)
    if repeats > 1 and ROUND not in choices:
        raise SettingError("repeats", "must be typed as repeats=NUMBER, without repeat=", repeats)
    return command, settings


def check_machine(command: ConfiguredCommand[Any], settings: RunSettings) -> None:
    """Raise a SettingError if a package or a program that the run needs is missing."""
    if command.needs_local(settings):
        require_local(command.name)
    if command.measures:
        engine_of(settings).check_installed(settings)
    command.check_installed()


def put_servers(servers: Servers, plain: dict[str, Any]) -> None:
    """Put the commands after `--` into a configuration, because Hydra never gets these commands.

    With three or more commands, `plain` contains the number of the job's command, which is removed. For the servers a,
    b and c, the job with number 1 compares b with a, and the job with number 2 compares c with a.
    """
    if not servers:
        return
    # For one command 0: it is compared with nothing. For two commands 1: the second is compared with the first.
    number = plain.pop(SERVER) if len(servers) > 2 else len(servers) - 1
    plain["engine"]["start_command"] = servers[number]
    if number:
        # The command that the job's server is compared with.
        plain["engine"]["first_command"] = servers[0]


def _resolved(config: DictConfig) -> dict[str, Any]:
    """Return the composed configuration as dictionaries and lists.

    Raises:
        SettingError: a value is missing or cannot be looked up, or a value contains the key of an API.
    """
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise SettingError(str(error.full_key), "must be set") from error
    except OmegaConfBaseException as error:
        raise SettingError(str(error.full_key or "settings"), str(error).splitlines()[0]) from error
    # A preset or `${oc.env:NAME}` may contain a key. Texts for models are checked separately, because ordinary words in
    # them may look like a key.
    checked = copy.deepcopy(plain)
    prompts = checked.get("prompts") or {}
    texts = [f"prompt={checked.pop('prompt', '')}"]
    texts += [f"prompts.{name}={prompts.pop(name, '')}" for name in ("system", "template")]
    check_settings_have_no_key([json.dumps(checked, ensure_ascii=False), *texts])
    return dict(plain)


def require_files(settings: RunSettings) -> None:
    """Raise a SettingError if the directory of a model or a file of prompts does not exist.

    Called before the imports that take seconds.
    """
    if engine_of(settings).in_process:
        for role, model in settings.models.items():
            is_built_here = settings.weights == "random" and model.architecture is not None
            if not is_built_here:
                check_place(role, model.repository)
    if not isinstance(settings, PromptedSettings) or settings.prompts.repository is not None:
        return
    prompts = settings.prompts
    if not all(Path(file).expanduser().exists() for file in prompts.files):
        load_prompts(prompts)  # raises the error that names the missing file
