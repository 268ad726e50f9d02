"""Settings before Hydra reads them: slips that it explains badly, and keywords from Python."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

from harness.config.errors import SettingError, as_typed, nearest
from harness.config.settings import require
from harness.engines.registry import ENGINES
from harness.menu import names
from harness.menu.overrides import in_quotes, meant, with_full_name

# Hydra's own options, and those of them that are followed by a value.
_SWITCHES = "--help -h --hydra-help --version --resolve --run -r --multirun -m --shell-completion -sc".split()
_WITH_VALUE = (
    "--cfg -c --package -p --config-path -cp --config-name -cn --config-dir -cd"
    " --experimental-rerun --info -i"
).split()
# The values that an option takes, where they are few.
_PRINTED = ("job", "hydra", "all")
_TOLD = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_CHOICES = {"--cfg": _PRINTED, "-c": _PRINTED, "--info": _TOLD, "-i": _TOLD}
_PACKAGE = ("--package", "-p")
# Groups whose keys are not all settings of the command: Hydra's own, and those of one draft or engine.
_OPEN_GROUPS = ("hydra", "_global_", "command", "draft", "engine")
# Settings that choose a preset, which null is not.
GROUPS = ("model", "draft", "decoding", "placement", "prompts", "engine")
# What to type instead of leaving a setting out by `~`.
_NEEDED = {
    "model": "model=NAME names another",
    "draft": "draft=none measures the target alone",
    "engine": "engine=NAME names another",
    "prompts": "prompts=NAME names others",
    **dict.fromkeys(("results", "results.file"), "results.file=null collects no rows"),
}
# Settings of Hydra that name a place.
_DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
# What Hydra reads as a number, a truth or a list, where a name is asked for.
_NO_NAME = re.compile(r"null|true|false|[-+]?\d+(\.\d*)?|\[.*\]", re.IGNORECASE)


def check(arguments: Sequence[str], command: str, known: Collection[str]) -> None:
    """Refuse options that do not exist, words without an equals sign, and groups left out or null.

    Args:
        known: every setting of the command.

    Raises:
        SettingError: for the first one, with what to type instead.
    """
    is_value = False
    for index, argument in enumerate(arguments):
        following = list(arguments[index + 1 : index + 3])
        if is_value:
            is_value = False
        elif argument.startswith("-"):
            option, equals, value = argument.partition("=")
            takes_value = option in _WITH_VALUE
            is_switch = option in _SWITCHES or re.fullmatch("-[hmr]+", argument)
            if not takes_value and not is_switch:
                raise SettingError(
                    argument, _instead_of_option(argument, following, command, known)
                )
            is_value = takes_value and not equals
            if takes_value:
                values = [value] if equals else following[:1]
                _check_option(option, known, *values)
        elif argument.startswith("~"):
            _check_removal(argument)
        elif "=" not in argument:
            _check_word(argument, following, known)
        else:
            _check_group(argument)


def _instead_of_option(
    argument: str, following: Sequence[str], command: str, known: Collection[str]
) -> str:
    typed, _, value = argument.lstrip("-").partition("=")
    setting = typed.replace("-", "_")
    if not value and following and re.match("[^-=]+$", following[0]):
        value = following[0]
    if not value or not meant(setting, known):
        hint = nearest(setting, known)
        lists = f"({command} --help lists them)"
        return f"no such option{hint}; settings are typed as setting=value {lists}"
    assignments = [f"{setting}={value}"]
    if with_full_name(assignments[0], known) == assignments[0]:
        assignments = [f"{name}={value}" for name in meant(setting, known)]
    return f"settings are typed without dashes: {' or '.join(assignments)}"


def _check_option(option: str, known: Collection[str], value: str | None = None) -> None:
    """Check the value that follows an option; `--info` alone is `--info all`."""
    choices = _CHOICES.get(option, ())
    if value is None and option not in ("--info", "-i"):
        examples = f" of {', '.join(choices)}" if choices else ""
        raise SettingError(option, f"is followed by a value{examples}")
    if choices and value not in (None, *choices):
        raise SettingError(option, f"must be followed by one of {', '.join(choices)}", value)
    if option in _PACKAGE and value is not None and not _is_part(value, known):
        rule = f"must be followed by a setting or a group of settings{nearest(value, known)}"
        raise SettingError(option, rule, value)


def _is_part(name: str, known: Collection[str]) -> bool:
    """Whether a configuration can have a setting, a group or a key of this name."""
    if name in known or name.partition(".")[0] in _OPEN_GROUPS:
        return True
    groups = {setting.rpartition(".")[0] for setting in known}
    # The value of a setting may be a mapping, which has keys.
    return any(name.startswith(f"{setting}.") for setting in known if setting not in groups)


def _check_word(word: str, following: Sequence[str], known: Collection[str]) -> None:
    if word in known and following:
        value = " ".join(following).lstrip("= ").partition(" ")[0]
        raise SettingError(word, f"is typed with an equals sign and no spaces: {word}={value}")
    group = group_of(word)
    if group is not None:
        raise SettingError(word, f"is a value without its setting: {group}={word}")


def group_of(name: str) -> str | None:
    """The setting that takes a name, `model` for `tiny`; None for no name that is known."""
    values = {"model": names.presets("model"), "draft": names.drafts(), "engine": ENGINES.names()}
    for group in ("decoding", "placement", "prompts"):
        values[group] = names.presets(group)
    return next((setting for setting, presets in values.items() if name in presets), None)


def _check_removal(argument: str) -> None:
    """Refuse `~draft` and the like, with what to type instead. Other settings get their defaults."""
    name = argument.lstrip("~").partition("=")[0]
    if name == "command":
        _refuse_command()
    if name in _NEEDED:
        raise SettingError(argument, f"cannot be left out; {_NEEDED[name]}")


def _refuse_command() -> None:
    raise SettingError("command", "is the first word: python -m harness COMMAND")


def _check_group(argument: str) -> None:
    group, _, value = argument.partition("=")
    if not group:
        raise SettingError(argument, "is a value without its setting: setting=value")
    if group.lstrip("+") == "command":
        _refuse_command()
    if group.lstrip("+") in _DIRECTORIES:
        require(value != "null", group, "must name a directory", value)
    if group not in GROUPS or not _NO_NAME.fullmatch(value):
        return
    rule = "must be a preset"
    if group == "draft":
        rule += "; draft=none measures the target alone"
    raise SettingError(group, rule, value)


def from_keywords(settings: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Keywords from Python as they are typed: `decoding={"top_p": 0.9}` is `decoding.top_p=0.9`.

    Text stays as it is, so that it means what it means on the command line.

    Args:
        known: every setting of the command, by which a group is told from a mapping.

    Raises:
        SettingError: for a value of a type that no setting has.
    """
    return [
        f"{setting}={value}"
        for name, given in settings.items()
        for setting, value in _flat(name, given, known)
    ]


def _flat(setting: str, value: Any, known: Collection[str]) -> Iterator[tuple[str, str]]:
    is_group = setting.partition(".")[0] == "hydra" or any(
        name.startswith(f"{setting}.") for name in known
    )
    if isinstance(value, Mapping) and is_group:
        for key, part in value.items():
            yield from _flat(f"{setting}.{key}", part, known)
    elif setting == "draft" and value is None:
        yield setting, "none"
    elif isinstance(value, str):
        yield setting, value
    else:
        yield setting, _typed(setting, value)


def _typed(setting: str, value: Any) -> str:
    """A value in Hydra's grammar."""
    # NumPy's truth values and numbers.
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        value = value.item()
    if value is None or isinstance(value, Number):  # a bool is a number
        return as_typed(value)
    if isinstance(value, str):
        return in_quotes(value)
    if isinstance(value, os.PathLike):
        path = str(Path(value))
        # With a slash it is a path and no preset.
        return in_quotes(path if "/" in path else f"./{path}")
    if isinstance(value, Mapping):
        pairs = [f"{key}:{_typed(setting, part)}" for key, part in value.items()]
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(_typed(setting, item) for item in value) + "]"
    rule = "must be text, a number, true or false, None, a path, a list or a mapping"
    raise SettingError(setting, rule, f"<{type(value).__name__}>")
