"""Names a user may type for `model=`, `draft=` and `prompts=` that are no file in `conf/`.

Hydra asks its config sources for `model/7B_8bit` or `draft/./my-model`. The source here answers for

- suffixes: `7B_8bit_4GPUs` is the preset `7B` with `quantization` and `gpus` set;
- paths and hub repositories, anything with a slash, and prompt files by their ending;
- the whole `draft` group, which is the `model` group under another key, and `draft=none`;
- `+pair=13B+7B`, a target and its draft in one word, for sweeps over pairs that are no product of models and drafts.

Being a source, it works wherever Hydra composes: overrides, sweeps, experiments, tab completion.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

PACKAGE = Path(__file__).resolve().parents[1]
# The wheel carries conf/ inside the package; a checkout has it beside.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

_SUFFIX = re.compile(r"_(?:(?P<bits>[48]bit)|(?P<gpus>\d+)GPUs?)$")


def without_suffixes(name: str) -> str:
    """`7B_8bit_4GPUs` -> `7B`; paths are left alone."""
    while "/" not in name and (match := _SUFFIX.search(name)):
        name = name[: match.start()]
    return name


def default_draft(model: str) -> str:
    """The draft for a model that was named without one: the tiny pair is a pair, others are measured alone."""
    return "tiny_draft" if without_suffixes(model) == "tiny" else "none"


def default_prompts(model: str) -> str:
    """The prompt set in the language a model reads."""
    return "tiny" if without_suffixes(model) in ("tiny", "tiny_draft") else "english"


def _model(name: str) -> dict[str, Any] | None:
    if "/" in name:
        path = Path(name)
        if path.suffix == ".gguf":
            return {"name": name, "repository": str(path.parent), "gguf_file": path.name}
        return {"name": name, "repository": name}
    match = _SUFFIX.search(name)
    if match is None:
        return None
    changed = {"quantization": match["bits"]} if match["bits"] else {"gpus": int(match["gpus"])}
    return {"defaults": [name[: match.start()], "_self_"], "name": name, **changed}


def _draft(name: str) -> dict[str, Any]:
    return {"name": "none"} if name == "none" else {"defaults": [{"/model@_here_": name}]}


def _prompts(name: str) -> dict[str, Any] | None:
    return {"name": Path(name).stem, "file": name} if "/" in name or name.endswith((".txt", ".jsonl")) else None


def _pair(name: str) -> dict[str, Any]:
    model, _, draft = name.partition("+")
    return {"defaults": [{"override /model": model}, {"override /draft": draft or "none"}]}


_GROUPS = {"model": _model, "draft": _draft, "prompts": _prompts, "pair": _pair}


class NameSource(ConfigSource):
    """Answers `group/name` for the names above, before the files of `conf/` are asked."""

    @staticmethod
    def scheme() -> str:
        return "harness-names"

    def _answer(self, config_path: str) -> dict[str, Any] | None:
        group, _, name = config_path.partition("/")
        return _GROUPS[group](name) if name and group in _GROUPS else None

    def load_config(self, config_path: str) -> ConfigResult:
        config = OmegaConf.create(self._answer(config_path) or {})
        package = "_global_" if config_path.startswith("pair/") else None
        return ConfigResult(
            provider=self.provider, path=f"{self.scheme()}://{config_path}", config=config, header={"package": package}
        )

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "draft", "pair")

    def is_config(self, config_path: str) -> bool:
        return self._answer(config_path) is not None

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "" and results_filter is not ObjectType.CONFIG:
            return ["draft"]
        if config_path == "draft" and results_filter is not ObjectType.GROUP:
            return ["none", *sorted(preset.stem for preset in (CONF / "model").glob("*.yaml"))]
        return []


class NameSearchPath(SearchPathPlugin):
    """Puts `NameSource` first: `model=./tiny` is a directory although `conf/model/tiny.yaml` exists."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("harness", f"{NameSource.scheme()}://")


def register() -> None:
    """Make the names known to Hydra, and the resolvers that `conf/` uses. May be called twice."""
    Plugins.instance().register(NameSource)
    Plugins.instance().register(NameSearchPath)
    resolvers = {
        "default_draft": default_draft,
        "default_prompts": default_prompts,
        "shipped": lambda name: str(PACKAGE / "models" / "shipped" / name),
        "prompt_set": lambda name: str(PACKAGE / "experiments" / "prompt_sets" / f"{name}.jsonl"),
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
