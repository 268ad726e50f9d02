"""Loads presets as Hydra does, and refuses code in those of a user's directory, which are read as data.

Hydra imports and calls whatever `_target_` names, in callbacks, launchers and handlers of logs, and any preset can set
these. So a file sets only a few fields below `hydra`, by a list. The project's own files and installed plug-ins are
trusted, and so is whatever is typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.cli.manifest import check_unused
from harness.config.errors import SettingError

_RULE = "a preset runs no code and names no key: this must be typed, or left out"
# Where Hydra looks for presets besides the project's and those of plug-ins: `-cd DIR` and `hydra.searchpath=[...]`.
_DIRECTORIES = ("command-line", "hydra.searchpath in command-line")
# Settings below `hydra` that a file may have. The sweeper and the launcher are instantiated with what is in them, and
# the latter writes it into a shell script: they take plain words.
_OUTPUTS = re.compile(r"hydra\.(mode|job\.name|(run|sweep)\..+)")
_CHOICES = re.compile(r"hydra\.sweeper\.params\.(?!.*hydra).+")
_LAUNCHER = re.compile(
    r"hydra\.launcher\.(partition|account|qos|name|timeout_min|gpus_per_node|cpus_per_task|mem_gb|array_parallelism"
    r"|signal_delay_s|ray\.init\.address|additional_parameters\.[\w-]+)"
)
_PLAIN = re.compile(r"[\w.,:-]*", re.ASCII)
# Lines of a shell: for a preset of the group `launcher` that is itself typed.
_SETUP = re.compile(r"hydra\.launcher\.setup\[\d+\]")
# Settings that run a repository's code or a server, and the one that sends a key to an address.
_TYPED = re.compile(r"trust_remote_code|start_command|first_command|api_key_variable")
# `./my_method.py:MyMethod`
_CLASS_IN_FILE = re.compile(r"\.py:\w+$")
# Interpolations that stand for another value of the configuration, or for text: no object is made in them.
_LOOKED_UP = re.compile(r"\$\{((oc\.env|now|hydra|shipped|prompt_set|num_gpus):[^${}]*|[\w./]*)\}")


class _Presets(ConfigRepository):
    """Everything that Hydra finds by a name.

    Attributes:
        typed: the settings of the command line.
    """

    typed: Sequence[str] = ()

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Load a preset; a class in a file, which is imported for it, must be typed."""
        group, _, name = config_path.partition("/")
        # A sweep puts a backslash before the colon.
        typed = [word.replace("\\", "") for word in self.typed]
        if _CLASS_IN_FILE.search(name) and not any(name in word for word in typed):
            raise SettingError(group, _RULE, name)
        return super().load_config(config_path)


class PresetLoader(ConfigLoaderImpl):
    """Hydra's loader, which raises a SettingError for a preset that sets what must be typed."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository: _Presets = _Presets(config_search_path)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration, alone or of a job, and check the directory that Hydra will make for it."""
        self.repository.typed = overrides
        config = super().load_configuration(
            config_name, overrides, run_mode, from_shell, validate_sweep_overrides
        )
        # That of a sweep is made for all of its jobs, and none when Hydra only asks for the mode.
        if validate_sweep_overrides and run_mode is (config.hydra.mode or RunMode.RUN):
            check_unused(config)
        return config

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        result = super()._load_single_config(default, repo)
        if result.provider not in _DIRECTORIES or not isinstance(result.config, DictConfig):
            return result
        group, _, name = str(default.config_path).partition("/")
        is_typed = f"+{group}={name}" in self.repository.typed
        for setting, value in _settings(OmegaConf.to_container(result.config, resolve=False)):
            is_lines = group == "launcher" and is_typed and _SETUP.fullmatch(setting)
            if not is_lines and not _is_data(setting, value):
                directory = result.path.partition("://")[2]
                file = Path(directory, f"{default.config_path}.yaml")
                raise SettingError(f"{file}: {setting}", _RULE)
        return result


def _settings(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in a configuration, with its full name: `hydra.launcher.setup[0]`."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _settings(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _settings(part, f"{name}[{index}]")
    else:
        yield name, value


def _is_data(setting: str, value: Any) -> bool:
    """Whether a preset may have this value, because nothing can be run by it."""
    text = str(value)
    if "_target_" in setting or _CLASS_IN_FILE.search(text) or "${" in _LOOKED_UP.sub("", text):
        return False
    if value and _TYPED.search(setting):
        return False
    if not setting.startswith("hydra") or _OUTPUTS.fullmatch(setting):
        return True
    if _CHOICES.fullmatch(setting):
        # Hydra reads these as if they were typed, where a backslash may hide a sign.
        return not re.search(rf"\$\{{|\.py\\*:|{_TYPED.pattern}", text)
    return bool(_LAUNCHER.fullmatch(setting) and _PLAIN.fullmatch(text))
