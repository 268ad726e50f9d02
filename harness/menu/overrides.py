"""Free text on the command line, and settings that change within a session."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import re
import shlex
from collections.abc import Iterable
from typing import TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from harness.config.errors import SettingError, nearest
from harness.config.run import RunSettings
from harness.menu.conversion import from_config, setting_names

Settings = TypeVar("Settings", bound=RunSettings)


# Settings whose values are names or paths, several with commas between them; and those that are one path.
_NAMES = re.compile(
    r"model|draft|engine|prompts|pair|(model|draft)\.(name|repository|tokenizer|gguf_file)"
)
# Settings that may be a path; a mapping stays one, so that it is refused as such.
_FILES = re.compile(r"prompts\.file|draft\.rates|decoding\.synthetic_acceptance|output|task")
_PATHS = re.compile(r"results\.file|hydra\.(run|sweep)\.dir")
# Hydra reads these as meant: plain text, quoted text, lists and functions. A mapping would change some settings
# of a preset and keep its name.
_PLAIN = re.compile(
    r"[A-Za-z0-9_./:+@%-]*|\"[^\"]*\"|'[^']*'|\[.*\]|(choice|glob|range|shuffle|sort|tag)\(.*\)"
)


def quote_text(argument: str) -> str:
    """`prompt=Once, there` -> `prompt='Once, there'`: Hydra's grammar must not apply to a prompt, a name or a path.

    A `~` at the beginning of a path becomes the home directory, and `${...}` in one is still looked up. Values of
    other settings are quoted where they hold letters beyond ASCII. Everything else, and what is quoted already, stays
    as it is.
    """
    key, equals, value = argument.partition("=")
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    setting = key.lstrip("+")
    if not equals or quoted:
        return argument
    if key == "prompt":
        # OmegaConf would look up ${...}. A backslash escapes only characters with a meaning.
        literal = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", value)
        return f"prompt={in_quotes(literal)}"
    if _PATHS.fullmatch(setting):
        return f"{key}={_path(value)}"
    # Hydra's grammar has letters beyond ASCII only within quotes.
    may_be_path = _FILES.fullmatch(setting) or not value.isascii()
    is_text = may_be_path and not value.startswith(("[", "{"))
    if (_NAMES.fullmatch(setting) or is_text) and not _PLAIN.fullmatch(value):
        # Not `Path.exists`: that raises an error for a name longer than a file's may be.
        is_one_path = os.path.exists(os.path.expanduser(value))
        names = [value] if is_one_path else value.split(",")
        return f"{key}={','.join(map(_path, names))}"
    return argument


def _path(value: str) -> str:
    value = os.path.expanduser(value)
    return value if _PLAIN.fullmatch(value) else in_quotes(value)


def in_quotes(value: str) -> str:
    return (
        "'"
        + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
        + "'"
    )


def changed(settings: Settings, assignments: str, changeable: Iterable[str]) -> Settings:
    """Settings with `key=value ...` applied, all of them or none.

    Args:
        assignments: as typed after `:set`; a key may leave out its group, `temperature` for `decoding.temperature`.
        changeable: full names of the settings that a session may change.

    Raises:
        SettingError: for a key that is unknown or fixed, and a value outside its rule.
    """
    known = setting_names(type(settings))
    allowed = [name for name in known if name in set(changeable)]
    tree = dataclasses.asdict(settings)
    try:
        words = shlex.split(assignments)
    except ValueError:  # an unpaired quotation mark
        words = assignments.split()
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals:
            raise SettingError(":set", "is followed by key=value", word)
        matches = [name for name in allowed if name == key or name.rpartition(".")[2] == key]
        if not matches:
            if key in known:
                raise SettingError(
                    key, f"cannot be changed in a session, only {', '.join(allowed)}"
                )
            suggestion = nearest(key, [*allowed, *(name.rpartition(".")[2] for name in allowed)])
            raise SettingError(key, f"no such setting{suggestion}; there are {', '.join(allowed)}")
        try:
            value = OverridesParser.create().parse_override(word).value()
        except HydraException:
            raise SettingError(key, "has a value that cannot be read") from None
        *groups, last = matches[0].split(".")
        functools.reduce(operator.getitem, groups, tree)[last] = value
    return from_config(type(settings), tree)
