"""Command lines composed to settings, as `harness` composes them, and not run: next steps of answers among them."""

import functools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from harness.cli import conversion, names, typed
from harness.cli.composing import opened
from harness.cli.job import put_servers
from harness.commands.registry import configured, with_settings
from harness.config.command_line import Words
from harness.config.methods import METHODS
from harness.reporting.page import NextStep
from remembered_configs import remember

remember()


@contextmanager
def composing() -> Iterator[None]:
    """Within the block Hydra has our menu."""
    with opened():
        yield


def composed(
    command: str,
    *overrides: str,
    methods: Sequence[str] = (),
    servers: Sequence[Sequence[str]] = (),
) -> Any:
    """The settings of a run, or of a job of a sweep over these ways to draft."""
    config = compose(command, list(overrides))
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert plain.pop("command") == command
    put_servers(servers, plain)
    plain["draft"] = METHODS.without_others(plain["draft"], methods)
    return conversion.from_config(configured(command).settings, plain)


def composed_line(command: str, words: list[str]) -> Any:
    """The settings of a run; of a sweep those of its last job."""
    drafts = [word.removeprefix("draft=") for word in words if word.startswith("draft=")]
    methods = [names.method_name(draft) for draft in ",".join(drafts).split(",") if draft]
    divided = Words.divide(words)
    line = typed.read(divided, command)
    # Launchers may not be installed; tests/cli/test_launchers.py tries them.
    own = [word for word in line.settings if not re.match(r"\+launcher|hydra\.", word)]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(own), None)
    varied = methods if "multirun" in line.options else ()
    return composed(command, *jobs[-1], methods=varied, servers=divided.servers)


@contextmanager
def collected() -> Iterator[list[NextStep]]:
    """Every step of the answers that are made within the block, each with its command in full."""
    steps: list[NextStep] = []
    original: Any = NextStep.typed

    def typed(self: NextStep) -> str:
        command = original.fget(self)
        steps.append(NextStep(self.text, command=command))
        return command

    NextStep.typed = property(typed)
    try:
        yield steps
    finally:
        NextStep.typed = original


@functools.cache
def _accepted(line: str) -> None:
    program, command, *words = shlex.split(line)
    assert (program, command in with_settings()) == ("harness", True), line
    with composing():
        composed_line(command, words)


def all_accepted(steps: Iterable[NextStep]) -> None:
    """Each has a command that composes to settings.

    Raises:
        SettingError: they break a rule.
    """
    for step in steps:
        _accepted(step.command)
