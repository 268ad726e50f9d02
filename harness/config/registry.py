"""Finds records by their names, in this package and in a user's files."""

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

# Errors whose messages are clear without the name of the class in front.
_PLAIN_ERRORS = (AttributeError, ImportError, OSError)


class Record:
    """An object that a user can choose by its `name`: a command, an engine, a drafting method or an acceptance rule."""

    name: str


class RecordWithSettings(Record):
    """A record with further settings, which only apply to runs that choose this record.

    Attributes:
        settings: the dataclass of these settings.
    """

    settings: ClassVar[Any]


def names_of_fields(settings: Any) -> list[str]:
    """Return the names of a dataclass's fields; fields of base classes come first."""
    return [field.name for field in fields(settings)]


AnyRecord = TypeVar("AnyRecord", bound=Record)

# Matches the name of a class in a user's file: `./my_method.py:MyMethod`.
_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<attribute>[A-Za-z_]\w*)")


class Registry(Generic[AnyRecord]):
    """Records of one kind, by their names: built-in records, and records in a user's files.

    A record in a user's file is named after a class or an object in the file: `./file.py:Name`.

    Args:
        setting: the setting that names a record, for errors: `draft`.
        base: the class from which all records inherit, or its path if it belongs to `harness.local`.
        built_in: for each name the record, its class, or the path of its class: `module:CLASS` or `FILE.py:CLASS`.
        advice: the end of the error about an object that does not inherit from `base`; it explains how to write one.
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
        """Return the names of all built-in records."""
        return tuple(self._built_in)

    def is_in_file(self, name: str) -> bool:
        """Return whether the name has the form `./file.py:Name`."""
        return _IN_FILE.fullmatch(name) is not None

    def check_names_class(self, name: str) -> None:
        """Raise a SettingError if the name is a Python file without the name of a class in it: `./my_method.py`."""
        file = Path(name).expanduser()
        if file.suffix == ".py" and not file.is_dir():
            rule = f"must name a class of the file too: {name}:NAME"
            raise SettingError(self._setting, rule, name)

    def __getitem__(self, name: str) -> AnyRecord:
        """Return the record with this name. A record in a user's file is loaded, which runs the file.

        Raises:
            SettingError: there is no such record, it cannot be loaded, or it has the wrong class.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def loaded(self, name: str) -> AnyRecord | None:
        """Return the record if it is built in or was loaded before, otherwise None.

        This is for names in rows, because reading a row must not run a user's file.
        """
        return self[name] if self.is_built_in(name) else self._loaded.get(name)

    def all(self) -> dict[str, AnyRecord]:
        """Return every built-in record, by name."""
        return {name: self[name] for name in self.names()}

    def known(self) -> list[AnyRecord]:
        """Return every built-in record, and the records of users' files that were loaded before."""
        return [*(self.all() | self._loaded).values()]

    def is_built_in(self, name: str) -> bool:
        """Return whether the record belongs to this project."""
        return name in self._built_in

    def source(self, name: str) -> bytes | None:
        """Return the content of the user's file in a record's name, without what it imports; None for a built-in
        record.

        Raises:
            OSError: the file cannot be read.
        """
        # The content is part of a run's identity: after a change of the file, no earlier rows are reused.
        if self.is_built_in(name):
            return None
        return Path(name.rpartition(":")[0]).expanduser().read_bytes()

    def _load(self, name: str) -> AnyRecord:
        """Return the record with this name, for the first time.

        Raises:
            SettingError: as `__getitem__`.
        """
        # A record, its class, or a path; a name that is not built in may itself be a path, `./file.py:Name`.
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
            if inspect.isclass(record) and issubclass(record, self._base_class):
                record = record()
        except SettingError:
            raise
        # SystemExit, too, because a script that was not meant to be imported may try to end the process.
        except (Exception, SystemExit) as error:
            cause = str(error)
            if not isinstance(error, _PLAIN_ERRORS):
                cause = f"{type(error).__name__}: {cause}"
            raise SettingError(self._setting, f"cannot be loaded: {cause}", name) from error
        base = self._base_class
        if not isinstance(record, base):
            rule = f"must inherit from {base.__module__}.{base.__name__}"
            raise SettingError(self._setting, f"{rule}{self._advice}", name)
        record.name = name
        return record

    @property
    def _base_class(self) -> type[AnyRecord]:
        base = self._base
        return pkgutil.resolve_name(base) if isinstance(base, str) else base


def _module_of(file: Path) -> ModuleType:
    """Import and return the module in a file.

    The file's directory is added to the paths of this process and of the processes that it starts, so that they can
    import the module by its name.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: another module has this name.
        Exception: whatever the module raises.
    """
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
    # A module that is built into Python has no file.
    found = Path(getattr(module, "__file__", None) or "")
    if found.resolve() != path:
        raise ImportError(f"another module is called {path.stem}: rename the file")
    return module


Chosen = TypeVar("Chosen", bound="RecordWithSettings")


class SettingsRegistry(Registry[Chosen]):
    """Records with different settings: for example, only `lookup` has `draft.max_ngram`.

    Each registry of this kind belongs to a group of a run's configuration, `draft` or `engine`. The group names a
    record, and contains the values of that record's settings.

    Attributes:
        key: the setting in the group that names the record: `method` for `draft`, `name` for `engine`.
        default: the name of the record if the group lacks this setting.
    """

    key: ClassVar[str]
    default: ClassVar[str]

    def settings_class(self, config: Mapping[str, Any]) -> Any:
        """Return the dataclass of settings for the record that a group's configuration names.

        Raises:
            SettingError: there is no such record, or it cannot be loaded.
        """
        return self[str(config.get(self.key, self.default))].settings

    def owners(self, setting: str) -> list[str]:
        """Return the names of the built-in records that have this setting."""
        records = self.all().items()
        return [name for name, record in records if setting in names_of_fields(record.settings)]

    def without_others(self, config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Return a group's configuration without the settings that only other records of a sweep have.

        `-m draft=lookup,tiny_eagle3 draft.max_ngram=2` sets `max_ngram` in both jobs, but `tiny_eagle3` has no such
        setting, so it is removed from that job. A setting that no record of the sweep has is kept, and refused later.

        Args:
            names: the names of the records in the sweep.

        Raises:
            SettingError: a record does not exist, or cannot be loaded.
        """
        own = names_of_fields(self.settings_class(config))
        others = {setting for name in names for setting in names_of_fields(self[name].settings)}
        return {key: value for key, value in config.items() if key in own or key not in others}
