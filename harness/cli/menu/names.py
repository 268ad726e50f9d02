"""Configurations for names that have no file in `conf/`: `configuration("model/7B_8bit")`.

Hydra looks up `latency`, `model/7B_8bit` or `draft/./my-model` when it reads overrides, sweeps,
experiments or a word to complete, and asks here first (`config_source`). A configuration is what a
YAML file of `conf/` would hold: settings, and under `defaults` the configurations it begins with,
of which later ones win; `_self_` is the place of its own settings among them. For `7B_8bit` it is

    {"defaults": ["7B", "_self_"], "name": "7B_8bit", "quantization": "8bit"}

There are configurations for

- commands, with the defaults of their settings from the classes: files of `conf/` hold only what
  differs from these;
- suffixes: `7B_8bit_4GPUs` is the preset `7B` with `quantization` and `gpus` set;
- paths and hub repositories, which are names with a slash, and prompt files by their extension;
- the group `draft`, which has every name of the group `model`, and further `none`, the methods
  without weights, and `early_exit_8` for the first 8 layers;
- the group `engine`: engines of this project, and `./my_engine.py:MyEngine`.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.cli.menu.conversion import fixed_groups, value_types
from harness.commands.command import ConfiguredCommand
from harness.commands.registry import COMMANDS
from harness.config.installation import CONF
from harness.config.methods import METHODS
from harness.config.model_names import SERVED, split_suffixes, without_suffixes
from harness.config.run import PromptedSettings, RunSettings
from harness.config.settings import PROMPT_FILES, PromptSettings
from harness.engines.registry import ENGINES

# Lists of names -----------------------------------------------------------------------------------


def drafts() -> list[str]:
    """The values of `draft=` apart from models and files."""
    return ["none", *(name for name, method in METHODS.all().items() if method.named)]


def presets(group: str) -> list[str]:
    """The names that have a file in a group of `conf/`."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


# Names of models, drafts, engines and prompts -----------------------------------------------------


def _model(name: str) -> dict[str, Any] | None:
    """The configuration of a path, a GGUF file or a preset with suffixes; a preset is a file."""
    if name == SERVED:
        return {"name": name, "repository": name}
    path = Path(name)
    if path.suffix == ".gguf":
        return {"name": name, "repository": str(path.parent), "gguf_file": path.name}
    if "/" in name or name in (".", ".."):
        return {"name": name, "repository": name}
    parts = split_suffixes(name)
    if parts.base == name:
        return None
    config: dict[str, Any] = {"defaults": [parts.base, "_self_"], "name": name}
    if parts.quantization is not None:
        config["quantization"] = parts.quantization
    if parts.num_gpus is not None:
        config["gpus"] = parts.num_gpus
    return config


def _draft(name: str) -> dict[str, Any] | None:
    """The configuration of what `draft=` names, with the defaults of its method's settings.

    A model or a head gets the settings of the group `model` under that name: Hydra's
    `/model@_here_` means "a choice of the group `model`, put where this configuration is".
    """
    if name == "none":
        return {"name": "none"}
    METHODS.check_names_class(name)
    method, chosen = _method_and_choice(name)
    if method != "model":
        return _defaults(METHODS[method].settings) | {"name": name, "method": method} | chosen
    if without_suffixes(name) != name:
        # It begins with the draft of that name, as a model does.
        return _model(name)
    own_defaults = _defaults(METHODS["model"].settings)
    return {"defaults": ["_self_", {"/model@_here_": name}], **own_defaults}


def method_name(draft: str) -> str:
    """The method of what `draft=` names."""
    return _method_and_choice(draft)[0]


def _method_and_choice(name: str) -> tuple[str, dict[str, Any]]:
    """The method that a name stands for, and the settings that the name implies.

    `early_exit_8` -> ("early_exit", {"layers": [8]}), `lookup` -> ("lookup", {}), and any name that
    no other method knows is one of a model or a head: `7B` -> ("model", {}).
    """
    if METHODS.is_in_file(name):
        return name, {}
    for method, record in METHODS.all().items():
        chosen = record.choice(name)
        if chosen is not None and method != "model":
            return method, chosen
    return "model", {}


def _engine(name: str) -> dict[str, Any] | None:
    """The configuration of an engine: the defaults of its settings."""
    ENGINES.check_names_class(name)
    if not ENGINES.is_in_file(name) and name not in ENGINES.names():
        return None
    return _defaults(ENGINES[name].settings) | {"name": name}


def _prompts(name: str) -> dict[str, Any] | None:
    """The configuration of a prompt set: a file or a preset, with the defaults of its settings."""
    if name.endswith("/") or ("/" in name and Path(name).is_dir()):
        # A run's directory: its texts, else its prompts with their answers.
        files = [Path(name) / file for file in ("acceptance_texts.csv", "latency_prompts.csv")]
        name = str(next(filter(Path.exists, files), files[0]))
    if "/" in name or name.endswith(PROMPT_FILES):
        preset = {"name": Path(name).stem, "file": name}
    else:
        preset = load_preset(f"prompts/{name}")
    return _defaults(PromptSettings) | preset if preset else None


# Commands -----------------------------------------------------------------------------------------


def _command(name: str) -> dict[str, Any] | None:
    """The configuration that a run of a command begins with; None without settings."""
    record = COMMANDS[name]
    if not isinstance(record, ConfiguredCommand):
        return None
    kind = record.settings
    defaults: list[Any] = ["common", "_self_"]
    if issubclass(kind, PromptedSettings):
        # `config_source` registers this resolver: the set `tiny` for our tiny models, else `english`.
        defaults.insert(1, {"prompts": "${default_prompts:${model}}"})
    defaults += [{f"override hydra/{part}_logging": "stderr"} for part in ("job", "hydra")]
    # OmegaConf's mark of a value that must be set; those with a default follow.
    must_be_set = dict.fromkeys(value_types(kind), "???")
    config = {"defaults": defaults, "command": name} | must_be_set | _defaults(kind)
    return config | load_preset(name)


# Defaults from classes and files ------------------------------------------------------------------


def _defaults(kind: type) -> dict[str, Any]:
    """The defaults of a class's settings that are values, and no groups; a setting that must be set has none."""
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
    """A file of `conf/`, with its interpolations as they are; empty where there is no file."""
    file = CONF / f"{path}.yaml"
    if not file.is_file():
        return {}
    return typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))


# All of them --------------------------------------------------------------------------------------


_GROUPS = {
    "model": _model,
    "draft": _draft,
    "engine": _engine,
    "prompts": _prompts,
}


def configuration(path: str) -> dict[str, Any] | None:
    """The configuration of a command or of a name in a group, `latency` or `draft/lookup`.

    None where there is none: Hydra then looks for a file in `conf/`.
    """
    if path == "common":
        # That of every command begins with it.
        groups = {group: _defaults(kind) for group, kind in fixed_groups(RunSettings).items()}
        common = load_preset("common")
        groups["results"] |= common.pop("results")
        return _defaults(RunSettings) | groups | common
    if COMMANDS.is_built_in(path):
        return _command(path)
    group, _, name = path.partition("/")
    return _GROUPS[group](name) if name and group in _GROUPS else None
