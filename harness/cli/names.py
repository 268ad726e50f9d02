"""Makes configurations for names that have no file in `conf/`, and is the source from which Hydra takes them.

Hydra looks up `latency`, `model/7B_8bit` or `draft/./my-model` when it reads overrides, sweeps or experiments, and it
asks this source first. A configuration has the content that a YAML file in `conf/` would have: settings, and under
`defaults` a list of other configurations to begin with. Each entry of this list overrides the entries before it; the
entry `_self_` stands for the configuration's own settings. The configuration for `7B_8bit` is

    {"defaults": ["7B", "_self_"], "name": "7B_8bit", "quantization": "8bit"}

There are configurations for

- commands, with the defaults that the classes of settings declare: files of `conf/` only contain values that differ;
- suffixes: `7B_8bit_4GPUs` is the preset `7B` with `quantization` and `gpus` set;
- paths and repositories of the hub, which are names with a slash, and prompt files, known by their extension;
- the group `draft`, which has every name of the group `model`, and also `none`, the methods without weights, and
  `early_exit_8` for the first 8 layers;
- the group `engine`, with this project's engines and the user's own, `./my_engine.py:MyEngine`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from harness.cli.conversion import fixed_groups, value_types
from harness.commands.command import ConfiguredCommand
from harness.commands.registry import COMMANDS
from harness.config.errors import SettingError
from harness.config.installation import CONF, PACKAGE
from harness.config.machine import gpu_names
from harness.config.methods import METHODS
from harness.config.model_names import SERVED, split_suffixes, without_suffixes
from harness.config.run import PromptedSettings, RunSettings
from harness.config.settings import PROMPT_FILES, PromptSettings
from harness.engines.record import ENGINES, default_draft


def drafts() -> list[str]:
    """Return the values of `draft=` that are neither models nor files."""
    return ["none", *(name for name, method in METHODS.all().items() if method.named)]


def presets(group: str) -> list[str]:
    """Return the names that have a file in a group of `conf/`, without the presets of `--config-dir`."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


# Names of models, drafts, engines and prompts -----------------------------------------------------


def _model(name: str) -> dict[str, Any] | None:
    """Return the configuration of a path, a GGUF file or a preset with suffixes; None for any other name, such as a
    preset without suffixes, which is a file of `conf/` or of `--config-dir`. A file whose own name ends in a suffix is
    never looked for.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        return {"name": name, "repository": str(path.parent), "gguf_file": path.name}
    # `SERVED` is no repository: a run with this name reads no model.
    if "/" in name or name in (".", "..", SERVED):
        return {"name": name, "repository": name}
    base, bits, gpus = split_suffixes(name)
    if base == name:
        return None
    chosen = {"quantization": bits, "gpus": gpus}
    suffixes = {setting: value for setting, value in chosen.items() if value is not None}
    return {"defaults": [base, "_self_"], "name": name} | suffixes


def _draft(name: str) -> dict[str, Any] | None:
    """Return the configuration of a value of `draft=`, with the defaults of its method's settings.

    A model or a head gets the settings that the group `model` has for this name: in Hydra, `/model@_here_` means "a
    choice of the group `model`, put where this configuration is".

    Raises:
        SettingError: the name is a Python file without the name of a class, or its class cannot be loaded.
    """
    if name == "none":
        return {"name": "none"}
    METHODS.check_names_class(name)
    method, chosen = _method_and_choice(name)
    if method != "model":
        return _defaults(METHODS[method].settings) | {"name": name, "method": method} | chosen
    if without_suffixes(name) != name:
        # The configuration of `draft/7B_8bit` starts from `draft/7B`, just as that of `model/7B_8bit` starts from
        # `model/7B`.
        return _model(name)
    own_defaults = _defaults(METHODS["model"].settings)
    return {"defaults": ["_self_", {"/model@_here_": name}], **own_defaults}


def method_name(draft: str) -> str:
    """Return the name of the drafting method for a value of `draft=`; `model` for `none`, too. A user's file is not
    loaded: `./my_method.py:MyMethod` is itself the name.
    """
    return _method_and_choice(draft)[0]


def _method_and_choice(name: str) -> tuple[str, dict[str, Any]]:
    """Return the method that a name stands for, and the settings that the name implies.

    early_exit_8 -> ("early_exit", {"layers": [8]})
    lookup       -> ("lookup", {})
    7B           -> ("model", {}): a name that no other method knows names a model or a head
    """
    if METHODS.is_in_file(name):
        return name, {}
    for method, record in METHODS.all().items():
        chosen = record.choice(name)
        if chosen is not None:
            return method, chosen
    return "model", {}


def _engine(name: str) -> dict[str, Any] | None:
    """Return the configuration of an engine: the defaults of its settings; None if there is no such engine.

    Raises:
        SettingError: as `_draft`.
    """
    ENGINES.check_names_class(name)
    if not ENGINES.is_in_file(name) and name not in ENGINES.names():
        return None
    return _defaults(ENGINES[name].settings) | {"name": name}


def _prompts(name: str) -> dict[str, Any] | None:
    """Return the configuration of prompts from a file, a run's directory or a preset, with the defaults of their
    settings; None for any other name, such as a preset of `--config-dir`: Hydra reads that file itself, without the
    defaults.

    Raises:
        SettingError: the name is a directory without a file of prompts.
    """
    if name.endswith("/") or ("/" in name and Path(name).is_dir()):
        # In a run's directory, use its texts, or else its prompts with their answers.
        files = [Path(name) / file for file in ("acceptance_texts.csv", "latency_prompts.csv")]
        found = next(filter(Path.exists, files), None)
        if found is None and Path(name).is_dir():
            rule = "must be a file, or the directory of a run with acceptance_texts.csv or latency_prompts.csv"
            raise SettingError("prompts", rule, name)
        name = str(found or files[0])
    if "/" in name or name.endswith(PROMPT_FILES):
        # The name of `./mine.txt` is `mine`, and its path `mine.txt`.
        preset = {"name": Path(name).stem, "file": str(Path(name))}
    else:
        preset = load_preset(f"prompts/{name}")
    return _defaults(PromptSettings) | preset if preset else None


# Commands -----------------------------------------------------------------------------------------


def _command(name: str) -> dict[str, Any] | None:
    """Return the configuration that a run of a command begins with; None if the command has no settings."""
    record = COMMANDS[name]
    if not isinstance(record, ConfiguredCommand):
        return None
    kind = record.settings
    defaults: list[Any] = ["common", "_self_"]
    # `plan` decodes no prompts, but its presets may set some: it ignores settings that only other commands have.
    if issubclass(kind, PromptedSettings) or kind.IGNORES_OTHERS:
        # The resolver `default_prompts`, defined below, gives the set `tiny` for our tiny models, and `english` for
        # all others.
        defaults.insert(1, {"prompts": "${default_prompts:${model}}"})
    defaults += [{f"override hydra/{part}_logging": "stderr"} for part in ("job", "hydra")]
    # `???` is OmegaConf's mark for a value that must be set. Settings that have a default get it below, and then the
    # values in the command's own file in `conf/`.
    must_be_set = dict.fromkeys(value_types(kind), "???")
    config = {"defaults": defaults, "command": name} | must_be_set
    return config | _defaults(kind) | load_preset(name)


# Defaults from classes and files ------------------------------------------------------------------


def _defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a class's settings, without its groups and without settings that must be set."""
    types = value_types(kind)
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name in types and default is not dataclasses.MISSING:
            defaults[field.name] = list(default) if isinstance(default, tuple) else default
    return defaults


def load_preset(path: str) -> dict[str, Any]:
    """Return the content of a file of `conf/`, with interpolations unresolved; empty if there is no such file."""
    file = CONF / f"{path}.yaml"
    if not file.is_file():
        return {}
    preset: Any = OmegaConf.to_container(OmegaConf.load(file))
    return dict(preset)


# For each group of `conf/` whose names have configurations here: the function that makes one for a name.
_GROUPS = {"model": _model, "draft": _draft, "engine": _engine, "prompts": _prompts}


def configuration(path: str) -> dict[str, Any] | None:
    """Return the configuration of a command, or of a name in a group: `latency` or `draft/lookup`.

    None if this module makes no configuration for it. Hydra then looks for a file in `conf/`.

    Raises:
        SettingError: the name is that of a class or a directory that cannot be used.
    """
    if path == "common":
        # The configuration of every command begins with this one. Of the groups, `common.yaml` only has `results`, with
        # the values that differ from the defaults.
        groups = {group: _defaults(kind) for group, kind in fixed_groups(RunSettings).items()}
        common = load_preset("common")
        groups["results"] |= common.pop("results")
        return _defaults(RunSettings) | groups | common
    group, _, name = path.partition("/")
    if not name:
        return _command(path) if path in COMMANDS.names() else None
    return _GROUPS[group](name) if group in _GROUPS else None


# Hydra's plug-ins, whose methods Hydra calls -------------------------------------------------------


class NameSource(ConfigSource):
    """A source from which Hydra takes the configurations that `configuration` makes."""

    @staticmethod
    def scheme() -> str:
        return "harness-names"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a configuration that `configuration` makes, in Hydra's form."""
        config = OmegaConf.create(configuration(config_path) or {})
        # Let Hydra accept any key in a group, because a sweep may use a setting that only some drafts or engines have.
        # `conversion` refuses keys that none of them has. Values stay unresolved, because reading `???`, the mark for a
        # value that must be set, would raise an error.
        for name, part in [(config_path, config), *config.items_ex(resolve=False)]:
            if OmegaConf.is_dict(part) and name != "hydra":
                OmegaConf.set_struct(part, False)
        path = f"{self.scheme()}://{config_path}"
        return ConfigResult(self.provider, path, config, {"package": None})

    def is_group(self, config_path: str) -> bool:
        # Only groups without YAML files in `conf/`. Hydra finds the others itself.
        return config_path in ("draft", "engine")

    def is_config(self, config_path: str) -> bool:
        return configuration(config_path) is not None

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a group, for `glob(*)`. If Hydra wants the groups within it, there are none."""
        listed = {"draft": [*drafts(), *presets("model")], "engine": [*ENGINES.names()]}
        return listed.get(config_path, []) if results_filter is not ObjectType.GROUP else []


class NameSearchPath(SearchPathPlugin):
    """Puts `NameSource` first, so that `model=./tiny` means a directory although `conf/model/tiny.yaml` exists."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("harness", f"{NameSource.scheme()}://")


# In a configuration, `${in_package:local/x}` stands for the result of the function `in_package` for `local/x`.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    # The draft if the user gives none: the engine's own draft, or that of the tiny model.
    "default_draft": lambda model, engine: (
        default_draft(engine) or ("tiny_draft" if without_suffixes(model) == "tiny" else "none")
    ),
    "default_prompts": lambda model: (
        "tiny" if without_suffixes(model) in ("tiny", "tiny_draft") else "english"
    ),
    # The number of this machine's GPUs, within bounds, for launchers.
    "num_gpus": lambda least=0, most=1024: min(most, max(least, len(gpu_names()))),
    "in_package": lambda path: str(PACKAGE / path),
}


def register() -> None:
    """Make `NameSource` and the resolvers that `conf/` uses known to Hydra. May be called more than once."""
    Plugins.instance().register(NameSource)
    Plugins.instance().register(NameSearchPath)
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
