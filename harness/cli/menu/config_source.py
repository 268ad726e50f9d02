"""Makes Hydra ask `names` for a configuration before it looks for a file in `conf/`.

`register` is called once before Hydra starts. The methods of the two classes are those that Hydra's
plug-ins have; a path is `draft/lookup`, a group and a name in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from harness.cli.menu import names
from harness.config.installation import PACKAGE
from harness.config.machine import gpu_names
from harness.config.model_names import without_suffixes
from harness.engines.registry import ENGINES, default_draft


class NameSource(ConfigSource):
    """A source of Hydra's whose configurations `names.configuration` makes."""

    @staticmethod
    def scheme() -> str:
        return "harness-names"

    def load_config(self, config_path: str) -> ConfigResult:
        config = OmegaConf.create(names.configuration(config_path) or {})
        group = config_path.partition("/")[0]
        # Hydra is to take any key in a group, because a sweep sets what only some drafts or engines have:
        # `conversion` refuses what none has.
        # As written: a value that must be set, ???, cannot be read.
        for name, part in [(group, config), *config.items_ex(resolve=False)]:
            if OmegaConf.is_dict(part) and name != "hydra":
                OmegaConf.set_struct(part, False)
        path = f"{self.scheme()}://{config_path}"
        return ConfigResult(self.provider, path, config, header={"package": None})

    def is_group(self, config_path: str) -> bool:
        # Groups that have no directory in `conf/`, where Hydra finds the others.
        return config_path in ("", "draft", "engine")

    def is_config(self, config_path: str) -> bool:
        return names.configuration(config_path) is not None

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names in a group, for `glob(*)`; the group "" holds the groups."""
        if config_path == "" and results_filter is not ObjectType.CONFIG:
            return ["draft", "engine"]
        if config_path == "draft" and results_filter is not ObjectType.GROUP:
            return [*names.drafts(), *names.presets("model")]
        if config_path == "engine" and results_filter is not ObjectType.GROUP:
            return [*ENGINES.names()]
        return []


class NameSearchPath(SearchPathPlugin):
    """Puts `NameSource` first: `model=./tiny` is a directory although `conf/model/tiny.yaml` exists."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("harness", f"{NameSource.scheme()}://")


def register() -> None:
    """Make `NameSource` known to Hydra, and the resolvers that `conf/` uses. May be called again."""
    Plugins.instance().register(NameSource)
    Plugins.instance().register(NameSearchPath)
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


# Resolvers: `${shipped:tiny}` in a configuration is what `shipped` here returns for `tiny` ------------


def _default_draft(model: str, engine: str) -> str:
    """The tiny pair is a pair; other models are measured alone unless a draft is named."""
    draft_of_engine = default_draft(engine)
    if draft_of_engine is not None:
        return draft_of_engine
    return "tiny_draft" if without_suffixes(model) == "tiny" else "none"


def _default_prompts(model: str) -> str:
    return "tiny" if without_suffixes(model) in ("tiny", "tiny_draft") else "english"


def _num_gpus(least: int = 0, most: int = 1024) -> int:
    """The number of GPUs here, for launchers, within bounds."""
    return min(most, max(least, len(gpu_names())))


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "default_draft": _default_draft,
    "default_prompts": _default_prompts,
    "num_gpus": _num_gpus,
    "shipped": lambda name: str(PACKAGE / "local" / "models" / "shipped" / name),
    "prompt_set": lambda name: str(
        PACKAGE / "measuring" / "prompts" / "prompt_sets" / f"{name}.jsonl"
    ),
}
