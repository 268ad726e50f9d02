"""Command lines composed to settings, as `harness` composes them, and not run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from harness.cli.menu import config_source, conversion, names, server_words, typed
from harness.cli.menu.names import CONF
from harness.commands.registry import configured
from harness.config.command_line import Words
from harness.config.methods import METHODS
from remembered_configs import remember

remember()


@contextmanager
def composing() -> Iterator[None]:
    """Within the block Hydra has our menu."""
    config_source.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(
    command: str,
    *overrides: str,
    methods: Sequence[str] = (),
    servers: Sequence[Sequence[str]] = (),
) -> Any:
    """The settings of a run, or of a job of a sweep over these ways to draft."""
    plain: Any = OmegaConf.to_container(
        compose(command, list(overrides)), resolve=True, throw_on_missing=True
    )
    assert plain.pop("command") == command
    server_words.attach(servers, plain)
    plain["draft"] = METHODS.without_others(plain["draft"], methods)
    return conversion.from_config(configured(command).settings, plain)


def composed_line(command: str, words: list[str]) -> Any:
    """The settings of a run; of a sweep those of its last job."""
    drafts = [word.removeprefix("draft=") for word in words if word.startswith("draft=")]
    methods = [names.method_name(draft) for draft in ",".join(drafts).split(",") if draft]
    known = conversion.setting_hints(configured(command).settings)
    divided = Words.divide(words)
    _, settings, _ = typed.for_hydra(divided.typed, command, known)
    settings += server_words.server_settings(divided.servers, settings, command)
    # Launchers may not be installed; tests/cli/test_launchers.py tries them.
    own = [word for word in settings if not re.match(r"\+launcher|hydra\.", word)]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(own), None)
    varied = methods if "-m" in divided.typed else ()
    return composed(command, *jobs[-1], methods=varied, servers=divided.servers)
