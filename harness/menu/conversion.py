"""From a composed configuration to settings: plain mappings in, dataclasses out.

`from_config(LatencySettings, {"model": {"name": "tiny", ...}, "batch_size": 4, ...})` converts each
value to the type of its field. No OmegaConf past this file.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from harness.config.engines import EngineSettings
from harness.config.errors import SettingError, nearest
from harness.config.run import RunSettings
from harness.config.settings import DraftSettings, ModelSettings
from harness.drafting.registry import METHODS, Methods
from harness.engines.registry import ENGINES, Engines
from harness.records.registry import checked

SettingsType = TypeVar("SettingsType")

# Groups whose class depends on the record that they name: `draft` is one of `LookupSettings` where
# its method is `lookup`.
_CHOSEN: Mapping[object, Methods | Engines] = {
    DraftSettings: METHODS,
    EngineSettings: ENGINES,
}

# The largest integer of torch and numpy.
_MOST = 2**63 - 1


def from_config(
    kind: type[SettingsType], config: Mapping[str, Any], prefix: str = ""
) -> SettingsType:
    """Build the dataclass `kind` from a plain mapping (a resolved OmegaConf container).

    Raises:
        SettingError: for an unknown key, a missing key, or a value of the wrong type or outside its rule.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in config.items():
        if key not in hints:
            raise _unknown(kind, config, prefix, key)
        values[key] = _convert(hints[key], value, prefix + key)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values and field.default is dataclasses.MISSING:
            raise SettingError(prefix + field.name, "must be set")
    try:
        settings = kind(**values)
    except SettingError as error:  # a class knows its own fields, not the group it is in
        raise SettingError(prefix + error.setting, error.rule, error.value) from None
    if isinstance(settings, RunSettings):
        return typing.cast(SettingsType, checked(settings))
    return settings


def _names_of(kind: type) -> list[str]:
    """The fields that a user can set."""
    if issubclass(kind, DraftSettings | EngineSettings):
        return kind.setting_names()
    return list(typing.get_type_hints(kind))


def _unknown(kind: type, config: Mapping[str, Any], prefix: str, key: str) -> SettingError:
    """The error for a setting that the class does not have; it may be one of another way to draft."""
    if issubclass(kind, DraftSettings) and (owners := METHODS.owners(key)):
        drafts = ", ".join(owners).replace("model", "models, heads")
        drafts = " and ".join(drafts.rsplit(", ", 1))
        rule = f"is for {drafts}, not for draft={config.get('name')}"
        return SettingError(prefix + key, rule, config[key])
    if issubclass(kind, EngineSettings) and (owners := ENGINES.owners(key)):
        return SettingError(prefix + key, f"needs engine={' or '.join(owners)}")
    suggestion = nearest(key, _names_of(kind), prefix)
    return SettingError(prefix + key, f"no such setting{suggestion}")


def setting_names(kind: type, prefix: str = "") -> list[str]:
    """Every setting of `kind` as it is typed on the command line, `decoding.top_p` and the like."""
    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        names.append(prefix + name)
        group = _group_of(hint)
        if group in _CHOSEN:
            names += [f"{prefix}{name}.{key}" for key in _CHOSEN[group].setting_names()]
        elif group is not None:
            names += setting_names(group, f"{prefix}{name}.")
    return names


def plain_settings(kind: type) -> list[str]:
    """The settings of a class that are values, and no groups such as `decoding`."""
    hints = typing.get_type_hints(kind)
    return [field.name for field in dataclasses.fields(kind) if not _group_of(hints[field.name])]


def _group_of(hint: Any) -> type | None:
    """The dataclass in a hint such as `DraftSettings | None`; None for a hint of values."""
    for part in (hint, *typing.get_args(hint)):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    return None


def _fitting(kinds: Sequence[Any], value: Any) -> Any:
    """The kind that a value is to have, of those in the type of a setting.

    For `float | tuple[float, ...] | str | None` a list is for the tuple, a text for `str`, and any
    other value for the first kind, `float`.
    """
    for kind in kinds:
        takes_list = typing.get_origin(kind) is tuple and isinstance(value, list)
        takes_text = kind is str and isinstance(value, str)
        if takes_list or takes_text:
            return kind
    return kinds[0]


def _convert(hint: Any, value: Any, setting: str) -> Any:
    """`value` as the type `hint`, or a SettingError."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if type(None) in arguments:
        return None if value is None else _convert(_fitting(arguments, value), value, setting)
    if origin in (typing.Union, types.UnionType):
        return _number_or_word(arguments, value, setting)
    if origin is Literal:
        if value not in arguments:
            suggestion = nearest(str(value), arguments)
            rule = f"must be one of {', '.join(arguments)}{suggestion}"
            raise SettingError(setting, rule, value)
        return value
    if origin is tuple:
        if isinstance(value, Mapping):
            raise SettingError(setting, "must be a list", value)
        if not isinstance(value, list | tuple):
            value = [value]
        return tuple(_convert(arguments[0], item, setting) for item in value)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise SettingError(setting, "must be a mapping", value)
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return _group(typing.cast(type, hint), value, setting)
    return _scalar(hint, value, setting)


def _number_or_word(parts: tuple[Any, ...], value: Any, setting: str) -> Any:
    """A value of a setting such as `int | Literal["auto"]`, which takes a number or a word.

    The first part may be `bool` as well, and with a part `str` any text is taken.
    """
    words = [word for part in parts for word in typing.get_args(part)]
    if value in words or (str in parts and isinstance(value, str)):
        return value
    if isinstance(value, str):
        plain = "true, false" if parts[0] is bool else "a whole number"
        raise SettingError(setting, f"must be {plain} or {', '.join(words)}", value)
    return _convert(parts[0], value, setting)


def _group(kind: type, value: Any, setting: str) -> Any:
    """A group of settings; None for `draft=none`, which arrives as {"name": "none"}."""
    if not isinstance(value, Mapping):
        rule = f"must be a group of settings, such as {setting}.{_names_of(kind)[0]}=..."
        raise SettingError(setting, rule, value)
    if issubclass(kind, ModelSettings) and value.get("name") == "none":
        for key in set(value) - {"name"}:
            raise SettingError(
                f"{setting}.{key}", "needs a draft, and draft=none is none", value[key]
            )
        return None
    if kind in _CHOSEN:
        kind = _CHOSEN[kind].settings_class(value)
    return from_config(kind, value, setting + ".")


def _scalar(kind: Any, value: Any, setting: str) -> Any:
    """A number, text or a bool. Integers pass as floats, numbers as text."""
    if kind in (float, str) and type(value) in (int, float):
        value = kind(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise SettingError(setting, f"must be {wanted[kind]}", value)
    if kind is int and abs(value) > _MOST:
        raise SettingError(setting, "must be below 2^63", value)
    return value
