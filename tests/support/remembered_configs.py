"""Hydra's work on `conf/`, done once in a process: it takes most of the time of a command that refuses its settings.

What Hydra chooses, reads and merges before it applies the settings of a command line is the same in every command with
the same presets. Only what comes from `conf/` and Hydra is remembered: never a user's own presets, and never code in
files.
"""

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.types import Override

_choose = config_loader_impl.create_defaults_list
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_get_mode = Hydra.get_mode

# Chosen presets, and merged configurations. Pickled, because a copy out of them is faster than `deepcopy`, and no
# command can change another one's.
_pickled: dict[Hashable, bytes] = {}
# Our names, `conf/`, Hydra's own configurations, and its classes.
_OWN_PROVIDERS = {"harness", "main", "hydra", "schema"}


def remember() -> None:
    """Remember from now on."""
    config_loader_impl.create_defaults_list = _choose_once
    ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once
    # Each composition copies it in depth, and then replaces its list of sources at most.
    setattr(ConfigRepository, "__deepcopy__", lambda repository, memo: copy.copy(repository))  # noqa: B010
    Hydra.get_mode = _mode_of_a_run


def _choose_once(
    repo: IConfigRepository, config_name: str | None, overrides_list: list[Override], **options: Any
) -> DefaultsList:
    overrides = Overrides(repo, overrides_list)
    presets = [
        override for override in overrides_list if override not in overrides.config_overrides
    ]
    names = [config_name, *(override.value() for override in presets)]
    sources = _own_sources(repo, filter(None, map(str, names)))
    # What is no plain name may be a file of the test's directory.
    if sources is None or not all(re.fullmatch(r"[\w-]+", str(name)) for name in names):
        return _choose(repo, config_name, overrides_list, **options)

    def choose() -> DefaultsList:
        chosen = _choose(repo, config_name, presets, **options)
        return dataclasses.replace(chosen, defaults_tree=None)

    typed = tuple(override.input_line for override in presets)
    chosen = _copy_of((sources, config_name, typed, *options.values()), choose)
    chosen.overrides.config_overrides = chosen.config_overrides = overrides.config_overrides
    return chosen


def _merge_once(loader: ConfigLoaderImpl, defaults: Sequence[Any], repo: IConfigRepository) -> Any:
    sources = _own_sources(repo, [default.config_path for default in defaults])
    if sources is None:
        return _merge(loader, defaults, repo)
    key = sources, tuple(map(dataclasses.astuple, defaults))
    return _copy_of(key, lambda: _merge(loader, defaults, repo))


def _own_sources(repository: IConfigRepository, names: Iterable[str]) -> Hashable | None:
    """The places where the configurations are looked up; None if one of them may be a user's."""
    sources = repository.get_sources()
    if not {source.provider for source in sources} <= _OWN_PROVIDERS:
        return None
    # A colon is in the name of a class in a file.
    if any(":" in name for name in names):
        return None
    return tuple(source.path for source in sources)


def _copy_of(key: Hashable, make: Callable[[], Any]) -> Any:
    if key not in _pickled:
        _pickled[key] = pickle.dumps(make())
    return pickle.loads(_pickled[key])


def _mode_of_a_run(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """The mode of a run. For it Hydra composes the whole configuration once more, although few presets set one."""
    if any(re.match(r"\+|hydra", override) for override in overrides):
        return _get_mode(hydra, config_name, overrides)
    return None
