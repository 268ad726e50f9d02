"""The commands that answers name as the next ones, and whether they would run: each must compose to settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from harness.cli.menu import config_source, conversion, names, typed
from harness.cli.menu.names import CONF
from harness.commands.registry import configured, with_settings
from harness.config.methods import METHODS
from harness.reporting.page import Step
from remembered_configs import remember

remember()


@contextmanager
def collected() -> Iterator[list[Step]]:
    """Every step of the answers that are made within the block, with its command, room or not."""
    steps: list[Step] = []
    original = Step.typed

    def typed(self: Step, of_sweep: bool) -> str:
        command = original(self, of_sweep)
        steps.append(Step(self.text, command=command))
        return command

    Step.typed = typed  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        Step.typed = original  # type: ignore[method-assign]


def accepted(step: Step) -> Any:
    """The settings to which the command of a step composes, of a sweep those of its last job; None for commands
    that have none.

    Raises:
        SettingError: they break a rule.
    """
    program, command, *words = shlex.split(step.command.removeprefix("OMP_NUM_THREADS=1 "))
    assert program == "harness", step
    if command not in with_settings():
        assert command in ("report", "regress"), step
        return None
    is_sweep = "-m" in words
    config_source.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        known = conversion.setting_hints(configured(command).settings)
        _, settings, _ = typed.for_hydra(words, command, known)
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides([word for word in settings if word != "-m"])
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
        plain: Any = OmegaConf.to_container(
            compose(command, list(jobs[-1])), resolve=True, throw_on_missing=True
        )
    plain.pop("command")
    drafts = [word.removeprefix("draft=") for word in words if word.startswith("draft=")]
    drafted = [names.method_name(draft) for draft in ",".join(drafts).split(",") if draft]
    plain["draft"] = METHODS.without_others(plain["draft"], drafted if is_sweep else ())
    return conversion.from_config(configured(command).settings, plain)
