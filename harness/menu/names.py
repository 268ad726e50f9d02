"""Commands and their defaults, and names for `model=`, `draft=`, `prompts=` and `+pair=` that have no file in `conf/`.

Hydra looks up `latency`, `model/7B_8bit` or `draft/./my-model` in its config sources, for overrides, sweeps,
experiments and tab completion. The source here knows

- commands and the defaults of their settings, from the classes: files of `conf/` hold only what differs from these;
- suffixes: `7B_8bit_4GPUs` is the preset `7B` with `quantization` and `gpus` set;
- paths and hub repositories, anything with a slash, and prompt files by their extension;
- the `draft` group, which is the `model` group under another key, with `none`, the methods without weights,
  `early_exit_8` for the first 8 layers, `tiny_eagle3_tree` for dynamic trees, hybrids such as `suffix+tiny_eagle3`,
  and new heads for `distill`;
- the `engine` group: engines of this project and of installed packages, and `./my_engine.py:MyEngine`;
- `command:./my_command.py:MyCommand`, a command that has no file in `conf/`;
- `+pair=13B+7B`, a target and its draft in one word, for sweeps over chosen pairs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import re
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from harness.config.machine import gpu_names
from harness.config.model_names import is_head, split_suffixes, without_suffixes
from harness.config.run import PromptedSettings, RunSettings
from harness.config.settings import (
    PROMPT_FILES,
    DecodingSettings,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
    require,
)
from harness.menu.command import Command
from harness.menu.conversion import from_config
from harness.menu.hybrid import HybridSettings
from harness.menu.method import TextMethod
from harness.menu.records import COMMANDS, ENGINES, METHODS, default_draft

PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has conf/ inside the package, a checkout next to it.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


# The group of a hybrid's second part: in the group `draft` the hybrid itself would override it.
_OF_A_HYBRID = "draft_of_hybrid"
# Ends the name of a draft that proposes dynamic trees.
_OF_TREES = "_tree"
# Begins the name of the primary configuration of a command that has none in `conf/`.
_OF_A_COMMAND = "command:"


def drafts() -> list[str]:
    """The values of `draft=` apart from models and files."""
    return ["none", *(name for name, method in METHODS.all().items() if method.named)]


def _model(name: str) -> dict[str, Any] | None:
    if "/" in name or name in (".", ".."):
        path = Path(name)
        if path.suffix == ".gguf":
            return {"name": name, "repository": str(path.parent), "gguf_file": path.name}
        return {"name": name, "repository": name}
    parts = split_suffixes(name)
    if parts.base == name:
        return None
    configuration: dict[str, Any] = {"defaults": [parts.base, "_self_"], "name": name}
    if parts.quantization is not None:
        configuration["quantization"] = parts.quantization
    if parts.num_gpus:
        configuration["gpus"] = parts.num_gpus
    return configuration


def _draft(name: str) -> dict[str, Any]:
    """The configuration of what `draft=` names, with the defaults of its method's settings."""
    if name == "none":
        return {"name": "none"}
    if found := METHODS.split(name):
        return _hybrid(name, *found)
    if (drafter := _drafter_of_trees(name)) is not None:
        return {"defaults": [drafter, "_self_"], "name": name, "tree": "dynamic"}
    method, chosen = _method_and_choice(name)
    if method != "model":
        return _defaults_of_method(method) | {"name": name, "method": method} | chosen
    own_defaults = {"method": "model"} | _defaults_of_method("model")
    return {"defaults": ["_self_", {"/model@_here_": name}], **own_defaults}


def _drafter_of_trees(name: str) -> str | None:
    """`tiny_eagle3_tree` -> `tiny_eagle3`, a head or a model; None for any other name."""
    drafter = name.removesuffix(_OF_TREES)
    is_shorter = drafter not in (name, "") and "/" not in name
    if not is_shorter or (CONF / "model" / f"{name}.yaml").is_file():
        return None
    if _drafter_of_trees(drafter) is not None:
        return None  # `tiny_eagle3_tree_tree`
    return drafter if _method_and_choice(drafter)[0] == "model" else None


def _hybrid(name: str, text: str, other: str) -> dict[str, Any]:
    """The configuration of a hybrid: the other draft's, with the text method's settings."""
    method = method_name(name)
    require(other != "none", "draft", "must name a draft after the plus", name)
    record = METHODS[text]
    assert isinstance(record, TextMethod)
    own = _defaults(HybridSettings, HybridSettings.own_names())
    own |= _defaults_of_method(text) | record.hybrid_defaults()
    return {
        "defaults": [{f"/{_OF_A_HYBRID}@_here_": other}, "_self_"],
        **own,
        "name": name,
        "method": method,
    }


def _method_and_choice(name: str) -> tuple[str, dict[str, Any]]:
    """The method that a name stands for, and the settings that it implies."""
    if found := METHODS.split(name):
        text, other = found
        return f"{text}+{_method_and_choice(other)[0]}", {}
    if METHODS.is_in_file(name):
        return name, {}
    for method, record in METHODS.all().items():
        chosen = record.choice(name)
        if chosen is not None and method != "model":
            return method, chosen
    return "model", {}


def _engine(name: str) -> dict[str, Any] | None:
    """The configuration of an engine: the defaults of its settings."""
    if not ENGINES.is_in_file(name) and name not in ENGINES.names():
        return None
    kind = ENGINES[name].settings
    own = [setting for setting in kind.setting_names() if setting != "name"]
    return {"name": name} | _defaults(kind, own)


def _defaults_of_method(method: str) -> dict[str, Any]:
    """The defaults of a method's own settings; a model's are those of its preset's group."""
    kind = METHODS[method].settings
    names = [name for name in kind.setting_names() if name not in ("name", "method", "repository")]
    return _defaults(kind, names)


def _defaults(kind: type, names: Collection[str]) -> dict[str, Any]:
    """The defaults of these settings, where there are any."""
    defaults = {name: getattr(kind, name) for name in names if hasattr(kind, name)}
    return {
        name: list(default) if isinstance(default, tuple) else default
        for name, default in defaults.items()
    }


def plain_settings(kind: type) -> list[str]:
    """The settings of a class outside groups."""
    hints = typing.get_type_hints(kind)
    names = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        parts = (hint, *typing.get_args(hint))
        is_group = any(dataclasses.is_dataclass(part) for part in parts)
        if not is_group:
            names.append(field.name)
    return names


def _plain_defaults(kind: type) -> dict[str, Any]:
    return _defaults(kind, plain_settings(kind))


def written(path: str) -> dict[str, Any]:
    """A file of `conf/`, with its interpolations as they are; empty where there is no file."""
    return copy.deepcopy(_parsed(CONF / f"{path}.yaml"))


@functools.cache
def _parsed(file: Path) -> dict[str, Any]:
    """A file of `conf/`. Hydra asks for each one several times."""
    if not file.is_file():
        return {}
    return typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))


def method_name(draft: str) -> str:
    """The method of what `draft=` names."""
    return _method_and_choice(draft)[0]


def without_heads(argument: str) -> str:
    """`model=glob(*)` without the presets of draft heads, which are no targets; any other argument as it is."""
    if not re.match(r"\+*model=glob\(", argument):
        return argument
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        # Hydra words it when it reads the arguments.
        return argument
    pattern = override.value()
    if not isinstance(pattern, Glob):
        return argument
    excluded = [*map(str, pattern.exclude), *_heads()]
    return f"model=glob([{','.join(map(str, pattern.include))}],exclude=[{','.join(excluded)}])"


def _heads() -> list[str]:
    """The presets of draft heads."""
    heads = []
    for file in sorted((CONF / "model").glob("*.yaml")):
        preset: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
        if is_head(preset["repository"], preset.get("architecture")):
            heads.append(file.stem)
    return heads


def _prompts(name: str) -> dict[str, Any] | None:
    """The configuration of a prompt set: a file or a preset, with the defaults of its settings."""
    if "/" in name or name.endswith(PROMPT_FILES):
        own = {"name": Path(name).stem, "file": name}
    else:
        own = written(f"prompts/{name}")
    return _plain_defaults(PromptSettings) | own if own else None


def prompt_preset(name: str) -> PromptSettings:
    """The settings that `prompts=NAME` stands for, of a preset of a data set."""
    return from_config(PromptSettings, _prompts(name) or {})


def _pair(name: str) -> dict[str, Any]:
    model, _, draft = name.partition("+")
    return {"defaults": [{"override /model": model}, {"override /draft": draft or "none"}]}


def _default_draft(model: str, engine: str) -> str:
    """The tiny pair is a pair; other models are measured alone unless a draft is named."""
    if (draft := default_draft(engine)) is not None:
        return draft
    return "tiny_draft" if without_suffixes(model) == "tiny" else "none"


def primary(command: str) -> str:
    """The name of a command's primary configuration."""
    return command if COMMANDS.is_built_in(command) else _OF_A_COMMAND + quote(command, safe="")


def _common() -> dict[str, Any]:
    """The configuration that all commands begin with."""
    groups = {"model": ModelSettings, "decoding": DecodingSettings, "placement": PlacementSettings}
    defaults = {group: _plain_defaults(kind) for group, kind in groups.items()}
    return _plain_defaults(RunSettings) | defaults | written("common")


def _command(name: str) -> dict[str, Any] | None:
    """The primary configuration of a command; None for one without settings."""
    record = COMMANDS[name]
    built_in = COMMANDS.is_built_in(name)
    if built_in and record.settings is None:
        return None
    kind = record.settings or RunSettings
    defaults: list[Any] = ["common", "_self_"]
    if issubclass(kind, PromptedSettings):
        defaults.insert(1, {"prompts": "${default_prompts:${model}}"})
    defaults += [{f"override hydra/{part}_logging": "stderr"} for part in ("job", "hydra")]
    must_be_set = dict.fromkeys(plain_settings(kind), "???")
    config = {"defaults": defaults, "command": name} | must_be_set | _plain_defaults(kind)
    return config | (written(name) if built_in else _places_of(record))


def _places_of(record: Command) -> dict[str, Any]:
    """Where a command writes whose name may be a path."""
    file = f"results/{record.stem}.csv" if record.measures else None
    run = f"{record.stem}/${{now:%Y-%m-%d}}/${{now:%H-%M-%S-%f}}"
    outputs = {"run": {"dir": f"outputs/{run}"}, "sweep": {"dir": f"multirun/{run}"}}
    return {"results": {"file": file}, "hydra": outputs}


_GROUPS = {
    "model": _model,
    "draft": _draft,
    _OF_A_HYBRID: _draft,
    "engine": _engine,
    "prompts": _prompts,
    "pair": _pair,
}


class NameSource(ConfigSource):
    """Makes the configurations of the names above."""

    @staticmethod
    def scheme() -> str:
        return "harness-names"

    def _made(self, config_path: str) -> dict[str, Any] | None:
        if config_path == "common":
            return _common()
        if config_path.startswith(_OF_A_COMMAND):
            return _command(unquote(config_path.removeprefix(_OF_A_COMMAND)))
        if COMMANDS.is_built_in(config_path):
            return _command(config_path)
        group, _, name = config_path.partition("/")
        return _GROUPS[group](name) if name and group in _GROUPS else None

    def load_config(self, config_path: str) -> ConfigResult:
        config = OmegaConf.create(self._made(config_path) or {})
        if config_path.startswith(("draft/", f"{_OF_A_HYBRID}/", "engine/")):
            # A sweep sets what only some drafts or engines have; `conversion` refuses what none has.
            OmegaConf.set_struct(config, False)
        header = {"package": "_global_" if config_path.startswith("pair/") else None}
        return ConfigResult(self.provider, f"{self.scheme()}://{config_path}", config, header)

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "draft", "engine", "pair", _OF_A_HYBRID)

    def is_config(self, config_path: str) -> bool:
        return self._made(config_path) is not None

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "" and results_filter is not ObjectType.CONFIG:
            return ["draft"]
        if config_path == "draft" and results_filter is not ObjectType.GROUP:
            return [*drafts(), *sorted(preset.stem for preset in (CONF / "model").glob("*.yaml"))]
        if config_path == "engine" and results_filter is not ObjectType.GROUP:
            return ENGINES.names()
        return []


class NameSearchPath(SearchPathPlugin):
    """Puts `NameSource` first: `model=./tiny` is a directory although `conf/model/tiny.yaml` exists."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("harness", f"{NameSource.scheme()}://")


def register() -> None:
    """Make the names known to Hydra, and the resolvers that `conf/` uses. May be called again."""
    Plugins.instance().register(NameSource)
    Plugins.instance().register(NameSearchPath)
    resolvers: dict[str, Callable[..., Any]] = {
        "default_draft": _default_draft,
        "default_prompts": lambda model: (
            "tiny" if without_suffixes(model) in ("tiny", "tiny_draft") else "english"
        ),
        # For launchers: `${num_gpus:1}` is at least one.
        "num_gpus": lambda least=0, most=1024: min(most, max(least, len(gpu_names()))),
        "shipped": lambda name: str(PACKAGE / "models" / "shipped" / name),
        "prompt_set": lambda name: str(PACKAGE / "experiments" / "prompt_sets" / f"{name}.jsonl"),
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    OmegaConf.register_new_resolver("command_help", _command_help, replace=True)


def _command_help(*, _root_: Any) -> str:
    # It needs what this module defines.
    template = importlib.import_module("harness.menu.help").template
    return str(template(_root_))
