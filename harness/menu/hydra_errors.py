"""Words the mistakes that Hydra and OmegaConf find in the overrides as our own errors.

`latency temperature=1` makes Hydra say "Could not override 'temperature'. ... Key 'temperature' is
not in struct", over several lines. `explained` turns that into "temperature: no such setting (did
you mean decoding.temperature?)".
"""

from __future__ import annotations

import os
import re
import sys

from hydra import errors

from harness.config.errors import SettingError, nearest
from harness.config.model_names import without_suffixes
from harness.menu import conversion, names

# The extra that installs a launcher or sweeper that our presets use.
_EXTRAS = {
    "joblib": "joblib",
    "optuna": "optuna",
    "ray": "ray",
    "submitit_local": "slurm",
    "submitit_slurm": "slurm",
}
# What tables and other tools call settings.
_OTHER_NAMES = {
    **dict.fromkeys(("K", "k", "gamma"), "num_draft_tokens"),
    **dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("target", "target_model"), "model"),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model"), "draft"),
    **dict.fromkeys(("max_tokens", "max_length", "tokens", "num_tokens"), "max_new_tokens"),
    **dict.fromkeys(("limit", "num_samples", "samples", "n"), "num_prompts"),
    **dict.fromkeys(("output", "output_file", "out", "csv"), "file"),
    **dict.fromkeys(("T", "temp"), "temperature"),
    **dict.fromkeys(("batch", "bs"), "batch_size"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "quantization"),
    **dict.fromkeys(("device", "device_map"), "placement"),
}
# Groups whose presets are added to a run, which has none of them by default.
_ADDED_GROUPS = ("experiment", "launcher", "pair", "sweeper")


def explained(error: Exception, command: str, settings: type) -> SettingError | None:
    """The mistake in one line; None for an error that is no mistake in the overrides.

    Some errors are told by their class alone, others by their message; an example is beside each.

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
    # "Could not override 'decoding.top_pp'."
    if isinstance(error, errors.ConfigCompositionException) and "Could not override" in text:
        return _not_overridden(error, command, settings)
    # "Could not delete from config. 'temprature' does not exist."
    if "Could not delete" in text and "does not exist" in text:
        known = conversion.setting_names(settings)
        return _no_such_setting(text.split("'")[1], command, known)
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
        rule = "several values need -m (a sweep) or brackets (a list)"
        return SettingError(text.split("'")[1], rule)
    is_hydras = type(error).__module__.startswith("hydra")
    if is_hydras and isinstance(error, errors.HydraException | ValueError):
        return SettingError("settings", " ".join(text.split("\n\n")[0].split()))
    return None


def _no_such_preset(
    error: errors.MissingConfigException, command: str, group: str, choice: str
) -> SettingError:
    if group in ("hydra/launcher", "hydra/sweeper") and choice in _EXTRAS:
        rule = f"is not installed; pip install 'harness[{_EXTRAS[choice]}]' brings it"
        return SettingError(group, rule, choice)
    # Hydra has no options for a name with suffixes.
    known = list(error.options or names.presets(group))
    if group == "model" and _names_draft(choice):
        # Every model is a draft, so Hydra looked there.
        group = "draft"
        known = [*known, *names.drafts()]
    if group in ("model", "draft"):
        bases = [name for name in names.presets("model") if choice.startswith(name)]
        known += [f"{name}_{suffix}" for name in bases for suffix in ("8bit", "4bit", "2GPUs")]
    is_directory = choice and os.path.exists(choice)
    hint = f" (did you mean ./{choice}?)" if is_directory else nearest(choice, known)
    listed = (
        f"there are: {', '.join(known)}" if len(known) <= 12 else f"{command} --help lists them"
    )
    return SettingError(group, f"no such preset{hint}; {listed}", choice)


def _not_overridden(error: Exception, command: str, settings: type) -> SettingError:
    """A setting that is not there, or that does not take the value; the error's cause says which."""
    text = str(error)
    key = text.split("'")[1].split("@")[0]
    cause = str(error.__cause__ or text).splitlines()[0]
    if not re.search("not in struct|not in '|No match in the defaults list", cause + text):
        return SettingError(key, cause)
    # `decoding={temprature: 0}`: "Could not override 'decoding'.", "Key 'temprature' is not in struct"
    within = re.match("Key '(.*?)' is not in struct", cause)
    if within and within[1] not in key.split("."):
        key = f"{key}.{within[1]}"
    return _no_such_setting(key, command, conversion.setting_names(settings))


def _no_such_setting(key: str, command: str, known: list[str]) -> SettingError:
    if key in _ADDED_GROUPS:
        return SettingError(key, f"is typed with a plus: +{key}=...; {command} --help lists them")
    # `temperature` for `decoding.temperature` is the most common slip: the last part decides.
    last_part = key.rpartition(".")[2]
    meant = _OTHER_NAMES.get(last_part, last_part)
    candidates = [name for name in known if name.rpartition(".")[2] == meant]
    fewest_groups = min(candidates, key=lambda name: name.count("."), default=None)
    hint = f" (did you mean {fewest_groups}?)" if fewest_groups else nearest(key, known)
    return SettingError(key, f"no such setting{hint}; {command} --help lists them")


def _names_draft(choice: str) -> bool:
    """Whether the command line has this as the draft, or as one of several, with suffixes or without."""
    drafts: list[str] = []
    for word in sys.argv:
        key, _, value = word.lstrip("+").partition("=")
        if key == "draft":
            drafts += value.replace("'", "").split(",")
        elif key == "pair":
            drafts += [pair.partition("+")[2] for pair in value.split(",")]
    # The second part of a hybrid is one too.
    drafts += [draft.partition("+")[2] for draft in drafts]
    return choice in map(without_suffixes, drafts)
