"""Reads the arguments of commands that take files: settings as `name=value`, and paths. Hydra is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from harness.config.command_line import Words
from harness.config.errors import SettingError, nearest

Settings = TypeVar("Settings")


def read_arguments(kind: type[Settings], words: Words) -> tuple[Settings, list[str]]:
    """Read the settings among the words, and return them and all other words, in their order.

    Args:
        kind: a dataclass whose fields have defaults, and the types `str`, `Literal` or `list[str]`. A list collects
            every value that is typed for it; other settings may be typed once.

    Raises:
        SettingError: for an unknown setting or option, a setting that is given twice, a value that is not among its
            choices, a secret key, or a `--`.
    """
    words.check()
    if words.servers:
        raise SettingError("--", "no such argument; --help lists them")
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    others = []
    for word in words.typed:
        name, equals, text = word.partition("=")
        if equals and name in types:
            if types[name] == list[str]:
                values.setdefault(name, []).append(text)
                continue
            if name in values:
                raise SettingError(name, f"is given twice: {values[name]} and {text}")
            choices = get_args(types[name])
            if choices and text not in choices:
                rule = f"must be {' or '.join(choices)}{nearest(text, choices)}"
                raise SettingError(name, rule, text)
            values[name] = text
            continue
        is_option = word.startswith("-") and word != "-"
        # A word that names a file is a path, even if the file is called a=b.
        is_setting = bool(equals) and name.isidentifier() and not Path(word).exists()
        if is_option or is_setting:
            rule = f"no such argument{nearest(name, types)}; --help lists them"
            raise SettingError(name, rule)
        others.append(word)
    return kind(**values), others
