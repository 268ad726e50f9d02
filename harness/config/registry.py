"""Finds records by name, in this package and in files of the user's own."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from harness.config.errors import SettingError, nearest

# Errors whose text says enough.
_PLAIN_ERRORS = (AttributeError, ImportError, OSError)


class Record:
    """Anything that a user can name, by its `name`."""

    name: str


class RecordWithSettings(Record):
    """A record whose choice brings settings of its own.

    Attributes:
        settings: their dataclass.
    """

    settings: ClassVar[Any]


def names_of_fields(settings: Any) -> list[str]:
    """The names of a dataclass's settings, those of its bases first."""
    return [field.name for field in fields(settings)]


AnyRecord = TypeVar("AnyRecord", bound=Record)

# `./my_method.py:MyMethod`
_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<attribute>[A-Za-z_]\w*)")


def classes_of(module: str, **classes: str) -> dict[str, str]:
    """For a `Registry`, the places of records in one module: `classes_of("a.b", lookup="Lookup")`."""
    return {name: f"{module}:{class_name}" for name, class_name in classes.items()}


class Registry(Generic[AnyRecord]):
    """Records of one kind.

    `./file.py:Name` names a class, or an object, in a file.

    Args:
        setting: that names a record, for errors: `draft`.
        base: class of the records; or its place, where it is of the other wing.
        built_in: by name the records, or their classes, which a text names: `module:CLASS`, or `FILE.py:CLASS`.
        advice: on writing a record of one's own, for errors.
    """

    def __init__(
        self,
        setting: str,
        base: type[AnyRecord] | str,
        built_in: Mapping[str, AnyRecord | type[AnyRecord] | str],
        advice: str = "",
    ) -> None:
        self._setting = setting
        self._base = base
        self._built_in = built_in
        self._advice = advice
        self._loaded: dict[str, AnyRecord] = {}

    def names(self) -> tuple[str, ...]:
        """Every name that needs no file."""
        return tuple(self._built_in)

    def is_in_file(self, name: str) -> bool:
        """Whether the name is of the form `./file.py:Name`."""
        return _IN_FILE.fullmatch(name) is not None

    def check_names_class(self, name: str) -> None:
        """Raise a SettingError for a file without one of its classes: `./my_method.py`."""
        file = Path(name).expanduser()
        if file.suffix == ".py" and not file.is_dir():
            rule = f"must name a class of the file too: {name}:NAME"
            raise SettingError(self._setting, rule, name)

    def __getitem__(self, name: str) -> AnyRecord:
        """The record of this name.

        Raises:
            SettingError: there is none, or its module cannot be loaded.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def loaded(self, name: str) -> AnyRecord | None:
        """The record, if it is built in or was loaded before: for names in rows, which must run no code."""
        return self[name] if self.is_built_in(name) else self._loaded.get(name)

    def all(self) -> dict[str, AnyRecord]:
        """Every record of this project, by name."""
        return {name: self[name] for name in self.names()}

    def is_built_in(self, name: str) -> bool:
        """Whether the record belongs to this project."""
        return name in self._built_in

    def source(self, name: str) -> bytes | None:
        """The code of a record that is not built in, as far as one file holds it; None for a built-in one."""
        if self.is_built_in(name):
            return None
        file = inspect.getsourcefile(type(self[name]))
        return Path(file).read_bytes() if file else b""

    def _load(self, name: str) -> AnyRecord:
        record: Any = self._built_in.get(name, name)
        in_file = _IN_FILE.fullmatch(record) if isinstance(record, str) else None
        if not in_file and not self.is_built_in(name):
            advice = nearest(name, self.names()) or f"; there are: {', '.join(self.names())}"
            raise SettingError(self._setting, f"no such name{advice}", name)
        try:
            if in_file:
                module = _module_of(Path(in_file["file"]))
                record = getattr(module, in_file["attribute"])
            elif isinstance(record, str):
                record = pkgutil.resolve_name(record)
        except SettingError:
            raise
        # A script that was never meant to be imported may end the process.
        except (Exception, SystemExit) as error:
            cause = str(error)
            if not isinstance(error, _PLAIN_ERRORS):
                cause = f"{type(error).__name__}: {cause}"
            raise SettingError(self._setting, f"cannot be loaded: {cause}", name) from error
        return self._checked(name, record)

    def _checked(self, name: str, record: Any) -> AnyRecord:
        """The record itself; a class is instantiated."""
        base = self._base
        if isinstance(base, str):
            base = pkgutil.resolve_name(base)
        if inspect.isclass(record) and issubclass(record, base):
            record = record()
        if not isinstance(record, base):
            rule = f"must inherit from {base.__module__}.{base.__name__}"
            raise SettingError(self._setting, f"{rule}{self._advice}", name)
        record.name = name
        return record


def _module_of(file: Path) -> ModuleType:
    """The module in a file, imported by its name, so that processes started from here can import it too."""
    path = file.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    directory = str(path.parent)
    if directory not in sys.path:
        sys.path.append(directory)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), directory])
        )
    module = importlib.import_module(path.stem)
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise ImportError(f"another module is called {path.stem}: rename the file")
    return module


Chosen = TypeVar("Chosen", bound="RecordWithSettings")


class SettingsRegistry(Registry[Chosen]):
    """Records of which each has settings of its own: only `lookup` has `draft.max_ngram`.

    A group of a run's configuration, `draft` or `engine`, names one record and has its settings.

    Attributes:
        key: the setting within the group that names the record: `method` of `draft`, `name` of `engine`.
        default: the record of a group without that setting.
    """

    key: ClassVar[str]
    default: ClassVar[str]

    def settings_class(self, config: Mapping[str, Any]) -> Any:
        """The class of the settings that a group's configuration is for."""
        return self[str(config.get(self.key, self.default))].settings

    def owners(self, setting: str) -> list[str]:
        """The names of the records with a setting, among those that need no file."""
        records = self.all().items()
        return [name for name, record in records if setting in names_of_fields(record.settings)]

    def without_others(self, config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """A group's configuration without settings that only other records of a sweep have.

        `-m draft=lookup,tiny_eagle3 draft.max_ngram=2` sets `max_ngram` in both jobs; the job of
        `tiny_eagle3` is to go without. What no record of the sweep has stays, and is refused later.

        Args:
            names: the records of the sweep.
        """
        fields = names_of_fields(self.settings_class(config))
        others = {setting for name in names for setting in names_of_fields(self[name].settings)}
        return {key: value for key, value in config.items() if key in fields or key not in others}
