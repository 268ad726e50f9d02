"""Settings that change while the models stay loaded: `:set temperature=0.8 K=6`."""

from __future__ import annotations

import dataclasses
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from harness.commands.compare.record import CompareSettings
from harness.commands.registry import checked
from harness.config.command_line import SYNONYMS
from harness.config.errors import SettingError, nearest
from harness.config.settings import DecodingSettings
from harness.results.row import strict

CHANGEABLE = [f"decoding.{field.name}" for field in dataclasses.fields(DecodingSettings)]
CHANGEABLE += ["view", "seed", "chat_template"]


def changed(settings: CompareSettings, assignments: str) -> CompareSettings:
    """Settings with `name=value ...` applied, all of them or none.

    Args:
        assignments: a name may be typed without its group, or be a synonym.

    Raises:
        SettingError: a setting is unknown or stays as it is, or a value breaks its rule.
    """
    hints = get_type_hints(CompareSettings)
    for name, hint in get_type_hints(DecodingSettings).items():
        hints[f"decoding.{name}"] = hint
    by_last = {name.rpartition(".")[2]: name for name in CHANGEABLE}
    values: dict[str, dict[str, Any]] = {"decoding": {}, "": {}}
    for word in assignments.split():
        typed, equals, text = word.partition("=")
        if not equals:
            raise SettingError(word, "cannot be read as setting=value")
        last = typed.removeprefix("decoding.")
        setting = by_last.get(SYNONYMS.get(last, last))
        if setting is None:
            hint = nearest(last, by_last)
            rule = f"cannot be changed in a session{hint}, only {', '.join(CHANGEABLE)}"
            raise SettingError(typed, rule)
        group, _, name = setting.rpartition(".")
        values[group][name] = _read(setting, hints[setting], text)
    try:
        decoding = dataclasses.replace(settings.decoding, **values["decoding"])
    except SettingError as error:
        raise SettingError(f"decoding.{error.setting}", error.rule, error.value) from None
    new = dataclasses.replace(settings, decoding=decoding, **values[""])
    return cast(CompareSettings, checked(new))


def _read(name: str, hint: Any, text: str) -> Any:
    """A value as it is typed: a number, a truth value, a list, or a word."""
    validator: TypeAdapter[Any] = strict(hint)
    try:
        return validator.validate_json(text)
    except ValidationError:
        pass
    try:
        return validator.validate_strings(text)
    except ValidationError:
        raise SettingError(name, "has a value that cannot be read", text) from None
