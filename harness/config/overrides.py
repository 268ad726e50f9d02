"""Overrides as a hurried person types them: free text on the command line, and settings changed within a session."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable
from typing import TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from harness.config.commands import RunSettings
from harness.config.conversion import from_config, setting_names
from harness.config.errors import SettingError, nearest

Settings = TypeVar("Settings", bound=RunSettings)


def quote_text(argument: str) -> str:
    """`prompt=Once, there` -> `prompt='Once, there'`: a prompt is text, whatever Hydra's grammar would read in it.

    Other arguments, and values that are quoted already, stay as they are.
    """
    key, equals, value = argument.partition("=")
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    if key != "prompt" or not equals or quoted:
        return argument
    # OmegaConf would look up ${...}; and a backslash counts only before what has a meaning.
    value = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", value)
    value = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    return f"prompt='{value}'"


def changed(settings: Settings, assignments: str, changeable: Iterable[str]) -> Settings:
    """Settings with `key=value ...` applied, all of them or none.

    Args:
        assignments: as typed after `:set`; a key may leave out its group, `temperature` for `decoding.temperature`.
        changeable: the full names that a session may change.

    Raises:
        SettingError: for a key that is unknown or fixed, and a value outside its rule.
    """
    known = setting_names(type(settings))
    allowed = [name for name in known if name in set(changeable)]
    tree = dataclasses.asdict(settings)
    for word in _words(assignments):
        key, equals, _ = word.partition("=")
        if not equals:
            raise SettingError(":set", "is followed by key=value", word)
        matches = [name for name in allowed if name == key or name.rpartition(".")[2] == key]
        if not matches:
            if key in known:
                raise SettingError(key, f"cannot be changed in a session, only {', '.join(allowed)}")
            suggestion = nearest(key, [*allowed, *(name.rpartition(".")[2] for name in allowed)])
            raise SettingError(key, f"no such setting{suggestion}; there are {', '.join(allowed)}")
        try:
            value = OverridesParser.create().parse_override(word).value()
        except HydraException:
            raise SettingError(key, "has a value that cannot be read") from None
        *groups, last = matches[0].split(".")
        branch = tree
        for group in groups:
            branch = branch[group]
        branch[last] = value
    return from_config(type(settings), tree)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quotation mark without its twin
        return text.split()
