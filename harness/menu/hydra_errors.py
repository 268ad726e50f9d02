"""Words the mistakes that Hydra and OmegaConf find in the overrides as our own errors.

`latency temperature=1` makes Hydra say "Could not override 'temperature'. ... Key 'temperature' is
not in struct", over several lines. `explained` turns that into "temperature: no such setting (did
you mean decoding.temperature?)".
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from hydra import errors

from harness.config.errors import SettingError, did_you_mean, nearest
from harness.config.model_names import without_suffixes
from harness.menu import conversion, names
from harness.menu.typed import GROUPS, meant

# The extra that installs a launcher or sweeper that our presets use.
_EXTRAS = {
    "joblib": "joblib",
    "optuna": "optuna",
    "ray": "ray",
    "submitit_local": "slurm",
    "submitit_slurm": "slurm",
}
# Groups whose presets are added to a run, which has none of them by default.
_ADDED_GROUPS = ("experiment", "launcher", "pair", "sweeper")


def explained(error: Exception, command: str, settings: type) -> SettingError | None:
    """The mistake in one line; None for an error that is no mistake in the overrides.

    Some errors are recognised by their class, others by their message; an example is beside each. What was typed is
    read from `sys.argv`, which `cli` sets for `harness.run` too.

    Args:
        settings: the class of the command's settings, whose names are suggested.
    """
    text = str(error)
    if isinstance(error, errors.OverrideParseException):
        rule = "cannot be read as setting=value; put quotes around spaces, commas and brackets"
        return SettingError(str(error.override), rule)
    if isinstance(error, errors.MissingConfigException):
        # `model=7C`: the missing file is `model/7C`. Without a group it is a file of our own.
        group, _, choice = str(error.missing_cfg_file or "").rpartition("/")
        if group:
            return _no_such_preset(error, command, group, choice)
    # "Could not override 'decoding.top_pp'.", "Could not delete from config. 'decoding.top_pp' does not exist."
    if found := re.search("Could not (?:override|delete from config.) '([^'@]*)", text):
        key = found[1]
        cause = str(error.__cause__ or text).splitlines()[0]
        if not re.search("not in struct|not in '|No match in|does not exist", cause + text):
            return SettingError(key, cause)
        # `decoding={temprature: 0}`: "Could not override 'decoding'.", "Key 'temprature' is not in struct"
        within = re.match("Key '(.*?)' is not in struct", cause)
        if within and within[1] not in key.split("."):
            key = f"{key}.{within[1]}"
        if key in _ADDED_GROUPS:
            rule = f"is typed with a plus: +{key}=...; harness help {command} presets lists them"
            return SettingError(key, rule)
        known = list(conversion.setting_hints(settings))
        rule = f"no such setting{_meant_setting(key, known)}; "
        # Hydra stops at the first one.
        for other in _unknown_settings(known):
            if other != key:
                rule += f"{other}: no such setting{_meant_setting(other, known)}; "
        return SettingError(key, f"{rule}harness help {command} all lists them")
    # "Error merging override draft.rates={a:1}"
    if text.startswith("Error merging override "):
        key, _, value = text.removeprefix("Error merging override ").partition("=")
        rule = "must be a list, not a mapping" if value.startswith("{") else "must be a mapping"
        return SettingError(key, rule, value)
    # "The --resolve flag can only be used in conjunction with --cfg or --help"
    if "--resolve flag" in text:
        return SettingError("--resolve", "needs --cfg job, or --help")
    # "Ambiguous value for argument 'model=7B,13B'"
    if "Ambiguous value for argument" in text:
        typed = text.split("'")[1]
        key, _, values = typed.partition("=")
        is_name = key.lstrip("+") in GROUPS
        as_list = "" if is_name else f", or are typed as a list: '{key}=[{values}]'"
        return SettingError(typed, f"several values need -m (a sweep){as_list}")
    is_hydras = type(error).__module__.startswith("hydra")
    if is_hydras and isinstance(error, errors.HydraException | ValueError):
        return SettingError("settings", " ".join(text.split("\n\n")[0].split()))
    return None


def _meant_setting(name: str, known: Sequence[str]) -> str:
    return did_you_mean(meant(name, known)[:3]) or nearest(name, known)


def _unknown_settings(known: Sequence[str]) -> list[str]:
    """The names on the command line that are no settings, as far as that is known before Hydra composes them.

    Groups may be followed by any setting of what they choose.
    """
    unknown = []
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        is_plain = re.fullmatch(r"\w+", name) is not None
        is_group = name in GROUPS or any(setting.startswith(f"{name}.") for setting in known)
        if equals and is_plain and not is_group and name not in known:
            unknown.append(name)
    return unknown


def _no_such_preset(
    error: errors.MissingConfigException, command: str, group: str, choice: str
) -> SettingError:
    if group in ("hydra/launcher", "hydra/sweeper") and choice in _EXTRAS:
        rule = f"is not installed; pip install 'specharness[{_EXTRAS[choice]}]' brings it"
        return SettingError(group, rule, choice)
    # Hydra has no options for a name with suffixes.
    known = list(error.options or names.presets(group))
    drafts = [*_typed("draft"), *(pair.partition("+")[2] for pair in _typed("pair"))]
    # The second part of a hybrid is one too.
    drafts += [draft.partition("+")[2] for draft in drafts]
    if group == "model" and choice in map(without_suffixes, drafts):
        # A draft's name may be that of any model, so Hydra looked among the models.
        group = "draft"
        known = [*known, *names.drafts()]
    if group in ("model", "draft"):
        bases = [name for name in names.presets("model") if choice.startswith(name)]
        known += [f"{name}_{suffix}" for name in bases for suffix in ("8bit", "4bit", "2GPUs")]
    listed = f"there are: {', '.join(known)}"
    if len(known) > 12:
        listed = f"harness help {command} presets lists them"
    rule = f"no such preset{_meant_preset(choice, known)}; {listed}"
    if group == "draft" and error.options:
        # Hydra stops at the first name that it does not find, and looks for drafts before targets.
        for target in _typed("model"):
            is_found = (
                "/" in target or target.endswith(".gguf") or without_suffixes(target) in known
            )
            if not is_found:
                rule += f"; model={target}: no such preset{_meant_preset(target, known)}"
    return SettingError(group, rule, choice)


def _meant_preset(choice: str, known: Sequence[str]) -> str:
    """What may be meant by a name that is none of these: a directory, a model of the same size, or a similar name."""
    if choice and os.path.exists(choice):
        return did_you_mean([f"./{choice}"])
    size = re.search(r"(?<![\d.])\d+(\.\d+)?b(?![a-z])", choice, re.IGNORECASE)
    if size is None:
        return nearest(choice, known)
    same_size = re.compile(rf"(?<![\d.]){re.escape(size[0])}(?![a-z])", re.IGNORECASE)
    models = [name for name in known if same_size.search(name)]
    return (
        nearest(choice, models)
        or did_you_mean(sorted(models, key=len)[:2])
        or nearest(choice, known)
    )


def _typed(group: str) -> list[str]:
    """The names of a group on the command line; several in a sweep."""
    choices: list[str] = []
    for word in sys.argv:
        key, _, value = word.lstrip("+").partition("=")
        if key == group:
            choices += value.replace("'", "").split(",")
    return choices
