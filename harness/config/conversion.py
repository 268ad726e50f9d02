"""From a composed configuration to settings: the door where OmegaConf ends."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from harness.config.errors import SettingError, nearest
from harness.config.settings import ModelSettings

SettingsType = TypeVar("SettingsType")


def from_config(kind: type[SettingsType], config: Mapping[str, Any], prefix: str = "") -> SettingsType:
    """Build the dataclass `kind` from a plain mapping (a resolved OmegaConf container).

    Raises:
        SettingError: for an unknown key, a missing key, or a value of the wrong type or outside its rule.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in config.items():
        if key not in fields:
            raise SettingError(
                prefix + key, f"no such setting{nearest(prefix + key, [prefix + name for name in fields])}"
            )
        values[key] = _convert(hints[key], value, prefix + key)
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise SettingError(prefix + name, "must be set")
    try:
        return kind(**values)
    except SettingError as error:  # a class knows its own fields, not where it stands
        raise SettingError(prefix + error.setting, error.rule, error.value) from None


def setting_names(kind: type, prefix: str = "") -> list[str]:
    """Every setting of `kind` as it is typed on the command line, `decoding.top_p` and the like."""
    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        names.append(prefix + name)
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                names += setting_names(typing.cast(type, part), f"{prefix}{name}.")
    return names


def _convert(hint: Any, value: Any, setting: str) -> Any:
    """`value` as the type `hint`, or a SettingError. Integers pass as floats; nothing else is coerced."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = [a for a in arguments if a is not type(None)]
        return _convert(hint, value, setting)
    if origin is Literal:
        # YAML reads an unquoted `none` as text, but `off`, `no` and the like as booleans: compare what was typed.
        if value not in arguments:
            raise SettingError(setting, f"must be one of {', '.join(arguments)}{nearest(str(value), arguments)}", value)
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise SettingError(setting, "must be a list", value)
        return tuple(_convert(arguments[0], item, setting) for item in value)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingError(setting, "must be a group of settings", value)
        # `draft=none` arrives as a mapping whose name says so.
        if hint is ModelSettings and value.get("name") == "none":
            return None
        return from_config(typing.cast(type, hint), value, setting + ".")
    if origin is Mapping or origin is dict or hint is Mapping:
        if not isinstance(value, Mapping):
            raise SettingError(setting, "must be a mapping", value)
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if type(value) is not hint:
        raise SettingError(setting, f"must be {wanted.get(hint, hint)}", value)
    if hint is float and value != value:
        raise SettingError(setting, "must be a number", value)
    return value
