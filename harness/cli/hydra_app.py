"""All that harness takes from Hydra beyond its public interface: private names, and what Hydra reads of the process.

Hydra has no public way to say which options it has, to compose presets of a further directory as its `-cd` does, to
look at a configuration before its directory is made, or to run a command line other than `sys.argv`.
tests/cli/test_hydra_app.py calls all of this; a release of Hydra in the range of pyproject.toml must pass it.
"""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig

_VERSION_BASE = "1.3"
# `calling` sets HYDRA_FULL_ERROR=1 for Hydra's own sake. So the processes of launchers, which inherit that, find in
# this variable whether the user asked for tracebacks.
_TRACEBACK = "HARNESS_TRACEBACK"
# The options of Hydra that commands take. The others compose another configuration or print what is Hydra's own, and
# `--experimental-rerun` runs code from a pickle.
_OFFERED = "-h --help -m --multirun -c --cfg --resolve -p --package -cd --config-dir"

WANTS_TRACEBACK = os.environ.get(_TRACEBACK, os.environ.get("HYDRA_FULL_ERROR", "")) == "1"


def options() -> Mapping[str, Action]:
    """Hydra's options that are offered, by each of their names, `-m` and `--multirun`: whether a value follows, and
    which ones.
    """
    actions = _parser()._option_string_actions
    return {name: actions[name] for name in _OFFERED.split()}


def flags(typed: Sequence[str]) -> Namespace:
    """Parse Hydra's options: `flags(["-m"]).multirun` is true."""
    return _parser().parse_args(typed)


def _parser() -> ArgumentParser:
    """Hydra's parser of options, also on Python 3.14, whose argparse reads each help text as its option is added: one
    text of Hydra 1.3 is an object that can only be shown.
    """
    from hydra._internal.utils import get_args_parser

    def add_argument(parser: ArgumentParser, *names: str, **settings: Any) -> Action:
        text = settings.pop("help", None)
        action = super(ArgumentParser, parser).add_argument(*names, **settings)
        action.help = text
        return action

    ArgumentParser.add_argument = add_argument  # type: ignore[assignment, method-assign]
    try:
        return get_args_parser()
    finally:
        # That of its base class is found again.
        del ArgumentParser.add_argument


@contextmanager
def composed(
    directory: Path, name: str, overrides: Sequence[str], presets: str | None
) -> Iterator[tuple[DictConfig, ConfigLoader]]:
    """Give a configuration, without a run, and the loader that knows the groups of presets.

    Args:
        directory: holds the configuration with this name, and all groups.
        presets: a directory with more presets, as after `-cd`; None for none.
    """
    from hydra import compose
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import setbase

    searched = create_config_search_path(str(directory))
    if presets is not None:
        searched.prepend("command-line", f"file://{Path(presets).resolve()}", "schema")
    setbase(_VERSION_BASE)
    GlobalHydra.instance().clear()  # In a notebook there may be one.
    try:
        Hydra.create_main_hydra2("harness", searched)
        yield compose(name, list(overrides)), GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().clear()


@contextmanager
def _checking_directories() -> Iterator[None]:
    """Let `check_unused` look at each configuration before Hydra makes the directory that it names."""
    import hydra._internal.hydra as internal
    from hydra.types import RunMode

    from harness.cli.manifest import check_unused

    module: Any = internal
    hydras_loader = module.ConfigLoaderImpl

    class Loader(hydras_loader):  # type: ignore[misc, valid-type]
        def load_configuration(
            self,
            config_name: str | None,
            overrides: list[str],
            run_mode: RunMode,
            from_shell: bool = True,
            validate_sweep_overrides: bool = True,
        ) -> DictConfig:
            config: DictConfig = super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
            # That of a sweep is made for all of its jobs, and none when Hydra only asks for the mode.
            if validate_sweep_overrides and run_mode is (config.hydra.mode or RunMode.RUN):
                check_unused(config)
            return config

    module.ConfigLoaderImpl = Loader
    try:
        yield
    finally:
        module.ConfigLoaderImpl = hydras_loader


@contextmanager
def calling(
    task: Callable[[Any], None], line: Sequence[str], directory: Path, name: str
) -> Iterator[Callable[[], None]]:
    """Give a function that runs a command line: Hydra calls the task with each configuration that it composes.

    Within the block `sys.argv` is this line, and Hydra raises exceptions instead of printing them over many lines.

    Args:
        task: a function of a module, or a method of an object that can be pickled: launchers call it in other
            processes.
        line: the name of the program, then Hydra's options and the settings.
        directory: holds the configuration with this name, and all groups.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import env_override

    GlobalHydra.instance().clear()  # In a notebook there may be one.
    # The package's attribute of this name is the function.
    module: Any = sys.modules["hydra.main"]
    hydras_parser = module.get_args_parser
    module.get_args_parser = _parser
    argv = sys.argv
    sys.argv = list(line)
    variables = {"HYDRA_FULL_ERROR": "1", _TRACEBACK: str(int(WANTS_TRACEBACK))}
    try:
        with env_override(variables), _checking_directories():
            yield hydra.main(str(directory), name, version_base=_VERSION_BASE)(task)
    finally:
        module.get_args_parser = hydras_parser
        sys.argv = argv
