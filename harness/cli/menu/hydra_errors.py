"""Words the mistakes that Hydra finds in the overrides as our own errors.

Hydra reports `latency model=7C` over several lines. `explained` turns them into "model=7C: no such preset (did you mean
7B?); harness help latency presets lists them".
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import typing

from hydra import errors
from omegaconf.errors import OmegaConfBaseException

from harness.cli.menu import names
from harness.cli.menu.conversion import alternatives, setting_hints
from harness.commands.registry import configured
from harness.config.errors import SettingError, did_you_mean, nearest
from harness.config.machine import command_line

# The extra that installs a launcher that our presets use.
_EXTRAS = {
    "joblib": "joblib",
    "ray": "ray",
    "submitit_local": "slurm",
    "submitit_slurm": "slurm",
}


def explained(error: Exception, command: str) -> SettingError | None:
    """The mistake in one line; None for an error that is no mistake in the overrides.

    Some errors are recognised by their class, others by their message; an example is beside each.
    """
    text = str(error)
    if isinstance(error, errors.OverrideParseException):
        rule = "cannot be read as setting=value; put quotes around spaces, commas and brackets"
        return SettingError(str(error.override), rule)
    if isinstance(error, errors.MissingConfigException):
        # `model=7C`: the missing file is `model/7C`. Without a group it is a file of our own.
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if group:
            return _no_such_preset(error, command, group, choice)
    # What yaml says of a preset: "while parsing a flow sequence\n  in \"mine.yaml\", line 2, column 3"
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return SettingError(
            f"{mark.name}, line {mark.line + 1}", f"is no YAML ({text.split(chr(10))[0]})"
        )
    # "The --resolve flag can only be used in conjunction with --cfg or --help"
    if "--resolve flag" in text:
        return SettingError("--resolve", "needs --cfg job, or --help")
    # "Ambiguous value for argument 'model=7B,13B'"
    if "Ambiguous value for argument" in text:
        return _several_values(text.split("'")[1], command)
    # "Could not override 'hydra.launcher.acount'": Hydra's advice to append it would be refused as well.
    cause = error.__cause__
    fields = getattr(cause, "object_type", None)
    refused = re.match(r"Could not override '([\w.]+)'", text)
    if refused and isinstance(cause, OmegaConfBaseException) and dataclasses.is_dataclass(fields):
        known = [field.name for field in dataclasses.fields(fields)]
        wrong = str(cause.key)
        return SettingError(refused[1], f"no such field{nearest(wrong, known)}")
    is_hydras = type(error).__module__.startswith("hydra")
    if is_hydras and isinstance(error, errors.HydraException | ValueError):
        said = [text.split("\n\n")[0], *str(error.__cause__ or "").splitlines()[:1]]
        return SettingError("settings", ": ".join(" ".join(part.split()) for part in said))
    return None


def _several_values(setting: str, command: str) -> SettingError:
    """`draft=tiny_draft,lookup: several values are a sweep: harness latency -m draft=tiny_draft,lookup`."""
    name, _, values = setting.partition("=")
    typed = shlex.split(command_line())[2:]
    rule = f"several values are a sweep: harness {command} -m {shlex.join(typed)}"
    hint = setting_hints(configured(command).settings).get(name)
    if any(typing.get_origin(kind) is tuple for kind in alternatives(hint)):
        rule += f"; as one list: {shlex.quote(f'{name}=[{values}]')}"
    return SettingError(setting, rule)


def _no_such_preset(
    error: errors.MissingConfigException, command: str, group: str, choice: str
) -> SettingError:
    """`model=7C: no such preset (did you mean 7B?); harness help latency presets lists them`."""
    if group == "hydra/launcher" and choice in _EXTRAS:
        rule = f"is not installed; pip install 'specharness[{_EXTRAS[choice]}]' brings it"
        return SettingError(group, rule, choice)
    # Hydra lists no presets where the missing one is that of a name with suffixes, `7C` of `7C_8bit`.
    known = list(error.options or names.presets(group))
    # A draft's name may be that of any model: "In 'draft/tiny_draf': Could not find 'model/tiny_draf'".
    if group == "model" and str(error).startswith("In 'draft"):
        group = "draft"
        known += names.drafts()
    if group in ("model", "draft"):
        bases = [name for name in names.presets("model") if choice.startswith(name)]
        known += [f"{name}_{suffix}" for name in bases for suffix in ("8bit", "4bit", "2GPUs")]
    listed = f"there are: {', '.join(known)}"
    if len(known) > 12:
        listed = f"harness help {command} presets lists them"
    if group in ("model", "draft") and (match := re.fullmatch(r"(.+)_(?:16bit|fp16|bf16)", choice)):
        setting = "dtype" if group == "model" else "draft.dtype"
        rule = f"no such preset: 16 bits are a dtype: {group}={match[1]} {setting}=bfloat16"
        return SettingError(group, rule, choice)
    # A directory is typed with a slash.
    is_there = choice and os.path.exists(choice)
    meant = did_you_mean([f"./{choice}"]) if is_there else nearest(choice, known)
    return SettingError(group, f"no such preset{meant}; {listed}", choice)
