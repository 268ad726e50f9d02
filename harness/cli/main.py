"""Commands, from the command line (`main`) and from Python (`run`).

Commands without settings, such as `report`, take their arguments themselves. All others go through Hydra: it composes a
configuration from presets and typed settings, once or for each job of a sweep, and calls `run_job` of an `_Invocation`,
which notes errors on the way: the exit code follows from them. From there `cli.composed` makes typed settings and runs
the experiment. Torch is imported only when the settings are known to be right.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from harness.cli import hydra_app, signals
from harness.commands.command import PathCommand
from harness.commands.registry import COMMANDS, commands, configured, measurement, with_settings
from harness.config.command_line import Words
from harness.config.engines import check_settings_have_no_key
from harness.config.errors import (
    CANNOT_TELL,
    HarnessError,
    RunError,
    SettingError,
    in_one_line,
    nearest,
)
from harness.config.installation import install_command, missing_local
from harness.config.machine import terminal_width
from harness.config.removed import REMOVED
from harness.reporting import terminal
from harness.reporting.table import visible

if TYPE_CHECKING:
    import pandas as pd

    from harness.results.schema import RunRow


_USAGE = """\
Measure whether speculative decoding pays for a pair of language models.

usage: harness COMMAND [setting=value ...] [-m] [-- SERVER COMMAND]

{commands}

{begin}
harness COMMAND --help shows a command's settings."""
_BEGIN = """\
To begin, harness latency measures a tiny pair that comes with it: no GPU, no
download, half a minute. harness latency -- llama-server ... measures your server."""
_BEGIN_WITHOUT_MODELS = """\
To begin, harness latency -- llama-server ... (or vllm serve ...) measures your
server. Models on this machine need more packages:
{install}"""

# What is typed to measure nothing.
_DRY_RUN = "dry_run=true"
_INTERRUPTED = "harness: interrupted; what was measured so far is kept"

# The worst of several exit codes counts. From the mildest: success, doubt, a wrong setting; then 1, a failure or a bad
# answer.
_SEVERITIES = {0: 0, 3: 1, 2: 2}


# Options that print something in place of a run.
_FOR_THE_TERMINAL = ("-h", "--help", "-c", "--cfg")

# The process has one Hydra, sys.argv and sys.stdout, so one thread at a time may run a command.
_run_lock = threading.RLock()


def main() -> None:
    """Entry point of `harness` and of `python -m harness`. Exits with 2 for a wrong setting, 1 for a failed run."""
    invocation = _Invocation()
    terminal.prepare_streams()
    words = Words.divide(sys.argv[1:])
    words.note()
    try:
        with signals.interrupting(_end_process):
            try:
                _dispatch(words, invocation)
            except SystemExit:
                # Hydra's help ends here, and its last lines may have no reader: `--help | head`.
                sys.stdout.flush()
                raise
            sys.stdout.flush()
    except KeyboardInterrupt:
        # The terminal may be gone.
        with suppress(OSError):
            print(_INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if hydra_app.WANTS_TRACEBACK and not isinstance(error, BrokenPipeError):
            raise
        # An error of stdout: `reporting` handles all others. Its buffer must not fail again at the exit.
        terminal.discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            print(f"harness: stdout cannot be written: {error.strerror}", file=sys.stderr)
            invocation.exit_codes.append(1)
    codes = invocation.exit_codes
    sys.exit(max(codes, key=lambda code: _SEVERITIES.get(code, 3), default=0))


def _end_process() -> NoReturn:
    """End the process as KeyboardInterrupt would, but without an exception, which an import could swallow."""
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, f"{_INTERRUPTED}\n".encode())
    os._exit(130)


def run(command: str, *overrides: str, verbose: bool = False, **settings: Any) -> pd.DataFrame:
    """Run a command from Python: `run("latency", model="7B", decoding={"num_draft_tokens": 6})`.

    It writes the same files as on the command line, and progress and messages go to stderr. With `-m` among the
    overrides it runs a sweep, where a job that fails is a row with its `status` and `error`. Calls from several
    threads run one after the other.

    Args:
        overrides: as on the command line, `"model=7B"`.
        verbose: also print the tables that the command prints.
        settings: the same as keywords, after the overrides. A group takes a preset, or a mapping of its settings.

    Returns:
        The rows of the run, or of all jobs of the sweep, with the columns that are not empty, the most needed first.

    Raises:
        SettingError: a setting is wrong. In a sweep, after the other jobs have run.
        RunError: the run failed.
        VerdictError: the run succeeded, with a bad answer: the pair is not lossless, for example. Where it cannot be
            told, rows are returned, and say so.
    """
    from harness.cli.menu import conversion, typed
    from harness.results.schema import frame

    kind = configured(_checked(command, with_settings())).settings
    words = [*overrides, *typed.from_keywords(settings, conversion.setting_hints(kind))]
    for word in words:
        if not isinstance(word, str):
            rule = 'must be text such as "batch_size=4", or a keyword: run("latency", batch_size=4)'
            raise SettingError("settings", rule, word)
        if "\0" in word:
            # A command line cannot have one, and neither can a path.
            raise SettingError(word.partition("=")[0], "must not have a null character")
        if word.partition("=")[0] in _FOR_THE_TERMINAL:
            raise SettingError(word, f"is for the command line: harness {command}")
    with _run_lock:
        invocation = _Invocation(quiet=True)
        divided = Words.divide([command, *words])
        divided.note()
        stdout = sys.stdout if verbose else io.StringIO()
        with signals.interrupting(), redirect_stdout(stdout):
            invocation.run_hydra(divided)
    for error in invocation.errors:
        if getattr(error, "exit_code", None) != CANNOT_TELL:
            raise error
    return frame(invocation.rows)


def _dispatch(words: Words, invocation: _Invocation) -> None:
    """Run the command that is named first, or print help or the version."""
    command, *others = words.typed or ["--" if words.servers else "help"]
    # `help latency presets` and `latency help presets` mean `latency --help presets`; `help presets` is about
    # the first command.
    names = _names()
    if command in ("-h", "--help", "help") and others == ["columns"]:
        from harness.cli.menu import help

        print(help.columns_help())
        return
    if command in ("-h", "--help", "help") and others:
        command = others.pop(0) if others[0] in names else names[0]
        others.insert(0, "--help")
    elif others[:1] == ["help"]:
        others[0] = "--help"
    if command in ("-h", "--help", "help"):
        print(_usage())
    elif command in ("-v", "-V", "version") or "--version" in words.typed:
        print(sys.modules["harness"].__version__)
    else:
        with invocation.reporting(command):
            record = COMMANDS[_checked(command, names)]
            if isinstance(record, PathCommand):
                check_settings_have_no_key(others)
                signals.load(record.program).main(Words(others, words.servers))
                return
        if not invocation.errors:
            invocation.run_hydra(Words([command, *others], words.servers))


def _usage() -> str:
    """Return the list of commands, with how to begin."""
    listed = commands()
    margin = max(len(command.name) for command in listed) + 4
    lines = []
    for command in listed:
        summary = f"  {command.name}".ljust(margin) + command.summary
        lines += textwrap.wrap(summary, terminal_width(), subsequent_indent=" " * margin)
        lines.append(f"{' ' * margin}harness {command.name} {command.example}")
    begin = _BEGIN
    if missing_local():
        begin = _BEGIN_WITHOUT_MODELS.format(install=install_command("local"))
    return _USAGE.format(commands="\n".join(lines), begin=begin)


def _names() -> list[str]:
    """Return the names of all commands, in the order of the list; the first is the default."""
    return [command.name for command in commands()]


def _checked(command: str, names: Collection[str]) -> str:
    """Return the command if it has one of these names.

    Raises:
        SettingError: it has not.
    """
    if not isinstance(command, str):
        raise SettingError("command", f"must be one of {', '.join(names)}", command)
    if command not in names:
        if command in _names():
            raise SettingError(command, f"is a command of the terminal: harness {command}")
        if command in REMOVED:
            raise SettingError(command, f"is gone: {REMOVED[command]}")
        rule = f"no such command{nearest(command, names)}; there are: {', '.join(names)}"
        raise SettingError(command, rule)
    return command


@dataclass
class _Invocation:
    """One call of a command, and its outcome.

    Attributes:
        quiet: whether errors are only collected, for `run` to raise; otherwise they are printed, too.
        servers: the commands behind `--`.
        dry_directory: where Hydra writes if nothing is to be measured; None for a run.
        planned: the label and settings of each job of such a run.
        rows: of the run, or of the sweep's jobs.
        exit_codes: of the errors, and of the sweep. The process ends with the worst of them.
    """

    quiet: bool = False
    servers: Sequence[Sequence[str]] = ()
    dry_directory: str | None = None
    planned: list[tuple[str, Any]] = field(default_factory=list)
    rows: Sequence[RunRow] = ()
    errors: list[Exception] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def run_hydra(self, words: Words) -> None:
        """Run a command that has settings, once or as a sweep, or say what that would measure."""
        asked = [word for word in words.typed if word.startswith("dry_run=")]
        if any(word != _DRY_RUN for word in asked):
            with self.reporting(words.typed[0]):
                raise SettingError(
                    "dry_run", "must be true, or left out", asked[0].partition("=")[2]
                )
            return
        if not asked:
            self._run_hydra(words)
            return
        from harness.cli.preview import preview_lines

        with tempfile.TemporaryDirectory() as self.dry_directory:
            directories = [f"hydra.{mode}.dir={self.dry_directory}" for mode in ("run", "sweep")]
            typed = [word for word in words.typed if word != _DRY_RUN]
            self._run_hydra(Words([*typed, *directories], words.servers))
        if self.planned:
            print("\n".join(preview_lines(self.planned)))

    def _run_hydra(self, words: Words) -> None:
        from harness.cli.manifest import SweepCallback
        from harness.cli.menu import config_source, names

        config_source.register()
        SweepCallback.is_preview = self.dry_directory is not None
        command = words.typed[0]
        self.servers = words.servers
        with self.reporting(command):
            line, help_text, prints = _hydra_line(words)
        if self.errors:
            return
        if help_text:
            print(help_text)
            return
        # What is printed in place of a run comes at the end: an error of stdout must not pass for one of Hydra's.
        printed = io.StringIO() if prints else None
        sweeps = configured(command).sweeps
        called = hydra_app.calling(self.run_job, line, names.CONF, command)
        is_interrupted = False
        try:
            with self.reporting(command), redirect_stdout(printed or sys.stdout), called as call:
                _call_hydra(call)
        except KeyboardInterrupt:
            is_interrupted = True
            raise
        finally:
            sweep = SweepCallback.directory
            SweepCallback.directory = None
            if sweep is not None and sweeps and self.dry_directory is None:
                from harness.cli import jobs

                is_refused = any(isinstance(error, SettingError) for error in self.errors)
                with self.reporting(command):
                    self.rows, exit_code = jobs.finish(
                        command, sweep, is_refused=is_refused, is_interrupted=is_interrupted
                    )
                    self.exit_codes.append(exit_code)
            if printed is not None:
                print(printed.getvalue(), end="")
        began = sweep is not None or printed is not None or "-m" not in line
        if sweeps and not began and not self.errors:
            # An error of a job kept it from beginning, in a process of the launcher that does not report it here.
            with self.reporting(command):
                raise RunError("the sweep could not begin; run it without +launcher= to see why")

    def run_job(self, config: Any) -> None:
        """Run what Hydra composed, once or for each job of a sweep.

        An error is reported here and counts for the exit code, so that the other jobs of a sweep run. A launcher may
        call a copy of this in another process.

        Args:
            config: the composed configuration.
        """
        from harness.cli import composed

        command = str(config.get("command"))
        if self.dry_directory is not None:
            with self.reporting(command):
                self.planned.append((composed.label(), composed.checked(config, self.servers)[1]))
            return
        with self.reporting(command), signals.within_time_limit():
            self.rows = composed.run(config, self.servers)
            if self.rows and not composed.is_sweep():
                bad_answer = measurement(command).bad_answer(self.rows)
                if bad_answer is not None:
                    raise bad_answer

    @contextmanager
    def reporting(self, command: str) -> Iterator[None]:
        """Collect an error of the block, and print it in a line or two; if a traceback was asked for, raise it."""
        try:
            yield
        except BrokenPipeError:
            raise
        except Exception as error:
            if hydra_app.WANTS_TRACEBACK:
                raise
            explained = error if isinstance(error, HarnessError) else None
            if explained is None and command in with_settings():
                from harness.cli.menu import hydra_errors

                # Hydra or OmegaConf may have found a mistake in the overrides.
                explained = hydra_errors.explained(error, command)
            reported = explained or error
            self.errors.append(reported)
            self.exit_codes.append(explained.exit_code if explained else 1)
            # Many jobs of a sweep may fail with the same error, which is printed once.
            is_printed = str(reported) in map(str, self.errors[:-1])
            if not self.quiet and not is_printed:
                message = visible(f"harness: {explained or in_one_line(error)}")
                print(message, file=sys.stderr, flush=True)


def _hydra_line(words: Words) -> tuple[list[str], str, bool]:
    """Compose the command line for Hydra.

    Returns:
        The line, or the help to print instead of calling Hydra, and whether Hydra prints something in place of a run.
    """
    from harness.cli.manifest import round_overrides
    from harness.cli.menu import conversion, help, server_words, typed
    from harness.measuring.progress import say

    command, *typed_words = words.typed
    record = configured(command)
    hints = conversion.setting_hints(record.settings)
    options, settings, topic = typed.for_hydra(typed_words, command, hints)
    values: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if values.get(name, value) != value:
            say(f"{name} is typed twice: {value} counts, and not {values[name]}")
        values[name] = value
    settings += server_words.server_settings(words.servers, settings, command)
    flags = hydra_app.flags(options)
    if flags.help:
        return [], help.command_help(record, settings, topic, flags.config_dir), False
    prints = bool(flags.cfg)
    rounds = [] if prints else round_overrides(command, settings)
    if not flags.multirun and (rounds or len(words.servers) > 2):
        options.append("-m")
    settings = [*rounds, *settings]
    # Hydra takes its options before or after all settings, but not among them.
    return [f"harness {command}", *options, *settings], "", prints


def _call_hydra(call: Callable[[], None]) -> None:
    """Call Hydra, and explain its errors: it makes directories before our code runs."""
    from harness.cli.manifest import Manifest, SweepCallback
    from harness.results.locked_files import DISK_ERRORS

    try:
        call()
    except OSError as error:
        # Hydra's error about a missing preset is an OSError without a number.
        if error.errno in (None, errno.EPIPE):
            raise
        if error.errno in DISK_ERRORS:
            raise RunError(f"the run's directory cannot be made: {error.strerror}") from error
        reason = f"cannot be made ({error.strerror}): name another, and results.file too if it is in the same place"
        value = [error.filename] if error.filename else []
        raise SettingError("hydra.run.dir (hydra.sweep.dir with -m)", reason, *value) from error
    sweep = SweepCallback.directory
    if sweep is not None and not Manifest.read(sweep).num_jobs:
        rule = "there are no jobs, because glob(...) matches no preset"
        raise SettingError("-m", f"{rule}; directories are listed, with commas between them")
