"""Words the mistakes that Hydra finds in the overrides as our own errors.

Hydra reports `latency model=7C` over several lines. `explained` turns them into "model=7C: no such preset (did you mean
7B?); harness help latency presets lists them".
"""

from __future__ import annotations

import os
import re
import typing

from hydra import errors

from harness.cli.menu import conversion, names
from harness.commands.registry import configured
from harness.config.command_line import INSTEAD
from harness.config.errors import SettingError, did_you_mean, nearest
from harness.config.installation import install_command


def explained(error: Exception, command: str) -> SettingError | None:
    """The mistake in one line; None for an error that is no mistake in the overrides.

    Some errors are recognised by their class, others by their message; an example is beside each.
    """
    text = str(error)
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
        return SettingError(
            f"{mark.name}, line {mark.line + 1}", f"is no YAML ({text.splitlines()[0]})"
        )
    # "The --resolve flag can only be used in conjunction with --cfg or --help"
    if "--resolve flag" in text:
        return SettingError("--resolve", "needs --cfg job, or --help")
    # "Ambiguous value for argument 'draft=lookup,tiny_draft'"
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        hint = conversion.setting_hints(configured(command).settings).get(several[1])
        rule = "has several values: -m measures each"
        if any(typing.get_origin(kind) is tuple for kind in conversion.alternatives(hint)):
            rule = f"must be typed as a list: '{several[1]}=[{several[2]}]'"
        return SettingError(several[1], rule, several[2])
    # "Only one of --run, --multirun, --cfg, --info and --shell_completion can be specified"
    if "can be specified" in text:
        return SettingError("-m", "has no --cfg: leave one of them out")
    # "range() arg 3 must not be zero", which is Python's own
    if isinstance(error, errors.HydraException) or text.startswith("range() "):
        messages = [text.split("\n\n")[0], *str(error.__cause__ or "").splitlines()[:1]]
        in_one_line = [" ".join(message.split()) for message in messages if message]
        return SettingError("settings", ": ".join(in_one_line))
    return None


def _no_such_preset(
    error: errors.MissingConfigException, command: str, group: str, choice: str
) -> SettingError:
    """`model=7C: no such preset (did you mean 7B?); harness help latency presets lists them`."""
    if group == "hydra/launcher":
        installing = f"{install_command('ray,slurm')} brings the launchers of ray and submitit"
        return SettingError(group, f"is not installed; {installing}", choice)
    # Hydra lists no presets where the missing one is that of a name with suffixes, `7C` of `7C_8bit`.
    names_of_group = list(error.options or names.presets(group))
    # A draft's name may be that of any model: "In 'draft/tiny_draf': Could not find 'model/tiny_draf'".
    if group == "model" and str(error).startswith("In 'draft"):
        group = "draft"
        names_of_group += names.drafts()
    if instead := INSTEAD.get(f"{group}={choice}"):
        return SettingError(group, instead, choice)
    listed = f"there are: {', '.join(names_of_group)}"
    if len(names_of_group) > 12:
        listed = f"harness help {command} presets lists them"
    # `7B_9bit`: the suffixes of a preset that exists.
    base = choice.rpartition("_")[0]
    if base in names_of_group:
        names_of_group += [f"{base}_8bit", f"{base}_4bit"]
    # A directory is typed with a slash.
    is_there = choice and os.path.exists(choice)
    meant = did_you_mean([f"./{choice}"]) if is_there else nearest(choice, names_of_group)
    return SettingError(group, f"no such preset{meant}; {listed}", choice)
