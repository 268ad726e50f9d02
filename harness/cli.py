"""argv -> command -> Hydra -> typed settings -> experiment. Torch is imported only once the settings hold."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from harness.config.errors import HarnessError, SettingError, nearest


@dataclass(frozen=True)
class Command:
    """A word after `python -m harness`.

    Attributes:
        settings: name of the dataclass in `harness.config.commands`.
        experiment: module with `run(settings, directory)`.
        summary: one line for the list of commands.
        example: what to type.
        measures: whether jobs of a sweep run in a process of their own, and are not repeated.
        sweeps: whether it may have several jobs.
    """

    settings: str
    experiment: str
    summary: str
    example: str
    measures: bool = True
    sweeps: bool = True


COMMANDS = {
    "latency": Command(
        "LatencySettings",
        "harness.experiments.latency",
        "how much faster speculative decoding is for a pair of models, and why",
        "latency model=30B draft=7B",
    ),
    "compare": Command(
        "CompareSettings",
        "harness.experiments.compare",
        "type a prompt and watch both decoders race, every token coloured by who wrote it",
        "compare model=13B draft=7B",
        sweeps=False,
    ),
    "eval": Command(
        "EvalSettings",
        "harness.experiments.evaluation",
        "whether speculative decoding answers as many questions rightly as the model alone",
        "eval model=13B draft=7B seeds=[0,1,2,3] num_prompts=1000",
    ),
    "recovery": Command(
        "RecoverySettings",
        "harness.experiments.recovery",
        "whether speculative decoding changes the output of a pair: exit code 0 lossless, 1 lossy, 3 not enough draws",
        "recovery model=30B draft=7B",
    ),
    "plan": Command(
        "PlanSettings",
        "harness.experiments.plan",
        "whether a pair fits on these GPUs or on pretended ones, before anything is downloaded",
        "plan model=65B draft=7B_8bit gpus=4 gpu_memory=40GB",
        measures=False,
    ),
}


# What brings a launcher or sweeper of Hydra's that our presets ask for.
_EXTRAS = {"joblib": "joblib", "optuna": "optuna", "ray": "ray", "submitit_local": "slurm", "submitit_slurm": "slurm"}

_wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
_exit_code = 0  # of the worst failure so far


def main() -> None:
    """Entry point of `python -m harness` and of `harness`. Exits with 2 for a wrong setting, 1 for a failed run."""
    global _exit_code
    _exit_code = 0
    # Of several processes that torchrun starts the first does the rest itself.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from harness.sweep import ranks

        if ranks.is_spare():
            sys.exit(0)
    try:
        with _termination_as_interrupt():
            _dispatch(sys.argv[1:])
            sys.stdout.flush()
    except KeyboardInterrupt:
        _fail("interrupted; what was measured so far is kept", 130)
    except BrokenPipeError:
        # Whoever read stdout has seen enough; without this Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(_exit_code)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """What a scheduler ends is written as what a user ends."""

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return
    if arguments[0] in ("-V", "--version"):
        from harness import __version__

        print(__version__)
        return
    command = arguments[0]
    if command not in (known := [*COMMANDS, "report"]):
        _fail(f"{command}: no such command{nearest(command, known)}; there are: {', '.join(known)}", 2)
    try:
        if command == "report":
            # It runs nothing, so that it has paths instead of settings.
            from harness.results.report import report

            report.main(arguments[1:])
            return
        _run_hydra(command, arguments[1:])
    except BrokenPipeError:
        raise
    except Exception as error:
        _report(error, command)


def run_job(config: Any) -> Any:
    """The task Hydra runs, once or once for each job of a sweep: `config` is the composed configuration.

    A failure is reported here and remembered for the exit code, so that the other jobs of a sweep go on.
    """
    try:
        return _run_experiment(config)
    except Exception as error:
        _report(error, str(config.get("command")))
        return 0.0


def _run_experiment(config: Any) -> Any:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from harness.config import commands as kinds
    from harness.config import conversion
    from harness.sweep import ranks

    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise SettingError(str(error.full_key or "settings"), str(error).splitlines()[0]) from error
    command = plain.pop("command")
    if command not in COMMANDS:
        raise SettingError("command", f"must be one of {', '.join(COMMANDS)}", command)
    settings = conversion.from_config(getattr(kinds, COMMANDS[command].settings), plain)
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    experiment = COMMANDS[command].experiment
    settings = ranks.settle(settings)
    if hydra.mode is not RunMode.MULTIRUN:
        if COMMANDS[command].measures and (count := ranks.num_ranks(settings)) > 1:
            return ranks.run(experiment, settings, directory, directory / f"{command}.csv", count)
        return _import(experiment).run(settings, directory)

    if not COMMANDS[command].sweeps:
        raise SettingError("-m", f"{command} holds one session and has no sweeps")

    from harness.sweep import jobs

    job = jobs.SweepJob(
        command=command,
        experiment=experiment,
        number=int(hydra.job.num),
        overrides=tuple(hydra.overrides.task),
        directory=directory,
        sweep_directory=directory.parents[len(Path(hydra.sweep.subdir).parts) - 1],
    )
    rows = jobs.run_job(job, settings) if COMMANDS[command].measures else jobs.run_here(job, settings)
    # A number for an optimiser, whatever happened: it stops at anything else.
    return float(rows[-1].get("speedup") or 0)


def _import(module: str) -> Any:
    """Import what brings torch along, without looking through all that is being made again and again for garbage."""
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.enable()


def _run_hydra(command: str, arguments: list[str]) -> None:
    global _exit_code
    import hydra
    from omegaconf import OmegaConf

    from harness.config import names, overrides
    from harness.sweep import sweep

    names.register()
    OmegaConf.register_new_resolver("num_gpus", _num_gpus, replace=True)
    # Hydra takes -m before or after all settings, but not among them.
    flags = [argument for argument in arguments if argument in ("-m", "--multirun")]
    others = [argument for argument in arguments if argument not in flags]
    sys.argv = [f"harness {command}", *flags, *map(overrides.quote_text, others)]
    # With this set Hydra lets exceptions through instead of printing them over many lines; `main` prints one line.
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path=str(names.CONF), config_name=command, version_base="1.3")(run_job)()
    finally:
        _exit_code = _worse(_exit_code, sweep.finish(command))
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _num_gpus(least: int = 0, most: int = 1024) -> int:
    """How many GPUs there are, for launcher presets: `${num_gpus:1}` is at least one."""
    from harness.results.environment import gpu_names

    return min(most, max(least, len(gpu_names())))


def _report(error: Exception, command: str) -> None:
    """Print an error as a user can use it, or raise it again where a traceback was asked for."""
    global _exit_code
    if _wants_traceback:
        raise error
    if isinstance(error, HarnessError):
        message, exit_code = str(error), error.exit_code
    elif explained := _explain(error, command):
        message, exit_code = explained, 2
    else:
        first_line = (str(error).strip().splitlines() or [""])[0]
        message, exit_code = f"{type(error).__name__}: {first_line} (HYDRA_FULL_ERROR=1 shows the traceback)", 1
    print(f"harness: {message}", file=sys.stderr, flush=True)
    _exit_code = _worse(_exit_code, exit_code)


def _worse(first: int, second: int) -> int:
    """Of two exit codes the one that a sweep ends with: a failure or a loss, then a wrong setting, then doubt."""
    return min(first, second, key=[1, 2, 3, 0].index)


def _fail(message: str, exit_code: int) -> None:
    print(f"harness: {message}", file=sys.stderr)
    sys.exit(exit_code)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "Find out whether speculative decoding pays for a pair of language models.",
        "",
        "usage: python -m harness COMMAND [setting=value ...] [-m]",
        "",
    ]
    for name, command in COMMANDS.items():
        lines += [f"  {name:{width}}  {command.summary}", f"  {'':{width}}  python -m harness {command.example}"]
    lines += [
        f"  {'report':{width}}  from the CSV files of all these to tables, Markdown, and one HTML page with plots",
        f"  {'':{width}}  python -m harness report results",
    ]
    lines += ["", "python -m harness COMMAND --help lists a command's settings and presets."]
    return "\n".join(lines)


def _explain(error: Exception, command: str) -> str | None:
    """What Hydra or OmegaConf found wrong with the overrides, in one line; None for any other error."""
    from hydra.errors import (
        ConfigCompositionException,
        HydraException,
        MissingConfigException,
        OverrideParseException,
    )

    from harness.config import commands as kinds
    from harness.config import conversion

    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as setting=value; quote what has spaces, commas or brackets in it"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if group in ("hydra/launcher", "hydra/sweeper") and choice in _EXTRAS:
            return f"{group}={choice}: is not installed; pip install 'harness[{_EXTRAS[choice]}]' brings it"
        few = len(error.options) <= 12
        known_presets = f"there are: {', '.join(error.options)}" if few else f"{command} --help lists them"
        return f"{group}={choice}: no such preset{nearest(choice, error.options)}; {known_presets}"
    if isinstance(error, ConfigCompositionException) and "Could not override" in text:
        key = text.split("'")[1].split("@")[0]
        cause = str(error.__cause__ or text).splitlines()[0]
        known = conversion.setting_names(getattr(kinds, COMMANDS[command].settings))
        if "not in struct" in cause or "not in '" in cause or "No match in the defaults list" in text:
            # `temperature` for `decoding.temperature` is the commonest slip: the last part decides.
            by_last_part = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
            suggestion = f" (did you mean {by_last_part[0]}?)" if by_last_part else nearest(key, known)
            return f"{key}: no such setting{suggestion}; {command} --help lists them"
        return f"{key}: {cause}"
    if "Ambiguous value for argument" in text:
        override = text.split("'")[1]
        return f"{override}: several values need -m (a sweep) or brackets (a list)"
    if isinstance(error, HydraException | ValueError) and type(error).__module__.startswith("hydra"):
        return " ".join(text.split("\n\n")[0].split())
    return None
