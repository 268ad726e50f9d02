"""Turns a composed configuration into settings: a plain mapping becomes a dataclass.

`from_config(LatencySettings, {"model": {"name": "tiny", ...}, "batch_size": 4, ...})` converts each value to the type
of its field.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from harness.commands.registry import checked, whose_setting
from harness.config.engines import EngineSettings
from harness.config.errors import SettingError, nearest
from harness.config.methods import METHODS
from harness.config.registry import SettingsRegistry
from harness.config.run import RunSettings
from harness.config.settings import DraftSettings
from harness.engines.record import ENGINES
from harness.results.row import strict

SettingsType = TypeVar("SettingsType")

# Groups whose class depends on the record that their settings name: if the method of `draft` is `lookup`, its class is
# `LookupSettings`.
_REGISTRIES: Mapping[object, SettingsRegistry[Any]] = {
    DraftSettings: METHODS,
    EngineSettings: ENGINES,
}

# The largest integer of torch and numpy. The limit also keeps out integers of 400 digits, which no float could hold.
_LARGEST_INTEGER = 2**63 - 1
# How error messages name types of values.
_IN_WORDS: Mapping[object, Sequence[str]] = {
    int: ("a whole number",),
    float: ("a number",),
    str: ("text",),
    bool: ("true", "false"),
    tuple: ("a list",),
    Mapping: ("a mapping",),
}


def from_config(
    kind: type[SettingsType], config: Mapping[str, Any], prefix: str = ""
) -> SettingsType:
    """Build the dataclass `kind` from a plain mapping (a resolved OmegaConf container).

    The settings of a run are returned with the changes that the engine's record makes to them (`registry.checked`).

    Args:
        prefix: the beginning of the settings' names in errors, such as `decoding.`.

    Raises:
        SettingError: a key is unknown or missing, a value has the wrong type or breaks its rule, or the settings of a
            run do not fit together.
    """
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for key, value in config.items():
        if key in hints:
            values[key] = _convert(hints[key], value, prefix + key)
        # `plan` takes another command's settings, and ignores those that it does not have.
        elif not (getattr(kind, "IGNORES_OTHERS", False) and whose_setting(key)):
            raise _unknown(kind, config, prefix, key)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        has_default = field.default is not dataclasses.MISSING
        has_factory = field.default_factory is not dataclasses.MISSING
        if field.name not in values and not has_default and not has_factory:
            raise SettingError(prefix + field.name, "must be set")
    try:
        settings = kind(**values)
    except SettingError as error:  # a class knows its own fields, not the group it is in
        raise SettingError(prefix + error.setting, error.rule, error.value) from None
    # The settings of a whole run: now that those of all groups are known, they are checked together.
    if isinstance(settings, RunSettings):
        return typing.cast(SettingsType, checked(settings))
    return settings


def setting_hints(kind: type) -> dict[str, Any]:
    """Return the type of every setting and of every group of `kind`, by the full name, such as `decoding.top_p`.

    The settings of every built-in draft and engine are included, because the classes of the groups `draft` and `engine`
    depend on what the user chooses. Settings that only a draft or an engine in a user's file has are missing.
    """
    hints = _hints(kind)
    for name, hint in _hints(kind).items():
        group = _group_of(hint)
        classes = [group] if group else []
        if group in _REGISTRIES:
            classes = [record.settings for record in _REGISTRIES[group].all().values()]
        for part in classes:
            hints |= {f"{name}.{key}": key_hint for key, key_hint in _hints(part).items()}
    return hints


def value_types(kind: type) -> dict[str, Any]:
    """Return the type of each setting of a class, without groups such as `decoding`."""
    return {name: hint for name, hint in _hints(kind).items() if not _group_of(hint)}


def fixed_groups(kind: type) -> dict[str, type]:
    """Return the groups that have the same settings in every run: `decoding`, but not `draft` or `engine`."""
    groups = {name: _group_of(hint) for name, hint in _hints(kind).items()}
    return {name: group for name, group in groups.items() if group and group not in _REGISTRIES}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a type hint joins: `int | None` -> (int, NoneType)."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


# Cached, because annotations are strings and evaluating them takes time.
_annotations = functools.cache(typing.get_type_hints)


def _hints(kind: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass."""
    hints = _annotations(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _group_of(hint: Any) -> type | None:
    """Return the dataclass in a hint such as `DraftSettings | None`; None if the hint only allows plain values."""
    for kind in alternatives(hint):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None


def _unknown(kind: type, config: Mapping[str, Any], prefix: str, key: str) -> SettingError:
    """Return the error for a setting that this class lacks. It names the drafts, engines or commands that have the
    setting, if any.
    """
    if issubclass(kind, EngineSettings):
        owners = ENGINES.owners(key)
        if owners:
            rule = f"needs engine={' or '.join(owners)}"
            if owners == ["server"] and "url" not in config:
                rule += ": name a server by url=, or type its command after --"
            return SettingError(prefix + key, rule)
    if issubclass(kind, DraftSettings):
        owners = METHODS.owners(key)
        if owners:
            listed = ["models, heads" if owner == "model" else owner for owner in owners]
            drafts = " and ".join(", ".join(listed).rsplit(", ", 1))
            rule = f"is for {drafts}, not for draft={config.get('name')}"
            return SettingError(prefix + key, rule, config[key])
    if issubclass(kind, RunSettings) and (rule := whose_setting(key)):
        return SettingError(key, rule)
    return SettingError(prefix + key, f"no such setting{nearest(key, _hints(kind), prefix)}")


def _convert(hint: Any, value: Any, setting: str) -> Any:
    """Return `value` as the type `hint`: integers are accepted as numbers, numbers as text, and one value as a list.

        hint                     value       result
        float                    1           1.0
        str                      7           "7"
        tuple[int, ...]          5           (5,)
        int | Literal["auto"]    "auto"      "auto"

    Raises:
        SettingError: the value has none of the hint's types, or an integer is too large; for a group as `from_config`.
    """
    kinds = alternatives(hint)
    group = _group_of(hint)
    # A group of settings, unless it is optional and absent.
    if group is not None and not (value is None and type(None) in kinds):
        return _convert_group(group, value, setting)
    origins = [typing.get_origin(kind) or kind for kind in kinds]
    given = tuple(value) if isinstance(value, list) else value
    candidates = [given]
    if str in kinds and type(value) in (int, float):
        candidates.append(str(value))
    if tuple in origins:
        candidates.append((given,))
    items = given if isinstance(given, tuple) else (given,)
    # Where text is expected, the digits stay text, and any number of them is allowed.
    if str not in kinds and any(type(n) is int and abs(n) > _LARGEST_INTEGER for n in items):
        raise SettingError(setting, "must be below 2^63", value)
    # `strict` converts only integers to numbers, so the first candidate that has the type as it stands is taken.
    for candidate in candidates:
        with suppress(ValidationError):
            return strict(hint).validate_python(candidate)
    raise _mistake(kinds, value, setting)


def _mistake(kinds: Sequence[Any], value: Any, setting: str) -> SettingError:
    """Return the error for a value that has none of these types: `num_prompts=few: must be a whole number or auto`, or
    for a list of words `samplings=topk: each must be one of as_asked, ... (did you mean top_k?)`.
    """
    origins = [typing.get_origin(kind) or kind for kind in kinds]
    item_words: list[Any] = []
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            item_words += _words(typing.get_args(kind))
    for item in value if isinstance(value, list) else [value]:
        if item_words and item not in item_words:
            choices = f"{', '.join(item_words)}{nearest(str(item), item_words)}"
            return SettingError(setting, f"each must be one of {choices}", item)
    words = _words(kinds)
    plain = [text for origin in origins for text in _IN_WORDS.get(origin, ())]
    if plain:
        *others, last = plain + words
        rule = " or ".join(filter(None, [", ".join(others), last]))
    else:
        rule = f"one of {', '.join(words)}{nearest(str(value), words)}"
    if isinstance(value, list) and tuple not in origins:
        rule += f"; -m {setting}={','.join(map(str, value))} measures each"
    return SettingError(setting, f"must be {rule}", value)


def _words(kinds: Sequence[Any]) -> list[Any]:
    """Return the values that a `Literal` among these types allows."""
    return [
        word
        for kind in kinds
        if typing.get_origin(kind) is Literal
        for word in typing.get_args(kind)
    ]


def _convert_group(kind: type, value: Any, setting: str) -> Any:
    """Return the dataclass of a group of settings; None for `draft=none`, which arrives as {"name": "none"}.

    Args:
        kind: the class in the type hint. For `draft` and `engine`, the result has the class of the chosen record's
            settings, which may be a subclass.

    Raises:
        SettingError: as `from_config`.
    """
    if not isinstance(value, Mapping):
        example = next(iter(_hints(kind)))
        rule = f"must be a group of settings, such as {setting}.{example}=..."
        raise SettingError(setting, rule, value)
    if kind is DraftSettings and value.get("name") == "none":
        for key in set(value) - {"name"}:
            raise SettingError(f"{setting}.{key}", "needs a draft, but draft=none", value[key])
        return None
    if kind in _REGISTRIES:
        kind = _REGISTRIES[kind].settings_class(value)
    return from_config(kind, value, setting + ".")
