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
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from harness.cli import hydra_app, signals
from harness.commands.command import PathCommand
from harness.commands.registry import COMMANDS, commands, configured, with_settings
from harness.config.command_line import Words
from harness.config.errors import HarnessError, RunError, SettingError, in_one_line, nearest
from harness.config.machine import terminal_width
from harness.config.packages import missing_local
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
server. Models on this machine need pip install 'specharness[local]'."""

_INTERRUPTED = "harness: interrupted; what was measured so far is kept"

# Of several exit codes the worst counts: success, doubt, a wrong setting; then 1, a failure or a bad answer, and any
# that a user's own command has.
_SEVERITIES = {0: 0, 3: 1, 2: 2}


# Options that print something in place of a run.
_FOR_THE_TERMINAL = (
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info"),
    *("-sc", "--shell-completion"),
)

# Hydra, sys.argv and sys.stdout are the process's, so that one thread at a time may run a command.
_running = threading.RLock()


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
        The rows of the run, or of all jobs of the sweep, with the columns of `docs/columns.md` that are not empty, the
        most needed first.

    Raises:
        SettingError: a setting is wrong. In a sweep, after the other jobs have run.
        RunError: the run failed.
        VerdictError: the run succeeded, with a bad answer: the pair is not lossless, for example.
    """
    from harness.cli.frames import frame
    from harness.cli.menu import conversion, typed

    kind = configured(_known(command, with_settings())).settings
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
    with _running:
        invocation = _Invocation(quiet=True)
        divided = Words.divide([command, *words])
        divided.note()
        stdout = sys.stdout if verbose else io.StringIO()
        with signals.embedded(), signals.interrupting(), redirect_stdout(stdout):
            invocation.run_hydra(divided)
    if invocation.errors:
        raise invocation.errors[0]
    return frame(invocation.rows)


def _dispatch(words: Words, invocation: _Invocation) -> None:
    """Run the command that is named first, or print help, the version, or completions (`-sc`)."""
    command, *others = words.typed or ["help"]
    # `help latency presets` and `latency help presets` mean `latency --help presets`; `help presets` asks of the first.
    names = _names()
    if command in ("-h", "--help", "help") and others:
        command = others.pop(0) if others[0] in names else names[0]
        others.insert(0, "--help")
    elif others[:1] == ["help"]:
        others[0] = "--help"
    if command in ("-h", "--help", "help"):
        print(_usage())
    elif command in ("-v", "-V", "--version", "version") or others == ["--version"]:
        print(sys.modules["harness"].__version__)
    elif "-sc" in words.typed:  # Hydra's option for shell completion
        with invocation.reporting(command):
            _complete(words.typed[words.typed.index("-sc") + 1 :], invocation)
    else:
        with invocation.reporting(command):
            record = COMMANDS[_known(command, names)]
            if isinstance(record, PathCommand):
                signals.load(record.program).main(Words(others, words.servers))
                return
        if not invocation.errors:
            invocation.run_hydra(Words([command, *others], words.servers))


def _complete(arguments: Sequence[str], invocation: _Invocation) -> None:
    """`harness -sc install=bash` and what it makes the shell ask: Hydra's completion, of the command on the line."""
    if len(arguments) != 1 or not re.fullmatch(
        "(install|uninstall|query)=(bash|zsh|fish)", arguments[0]
    ):
        rule = 'completes `harness ...` after eval "$(harness -sc install=bash)"; also uninstall=, and zsh or fish'
        raise SettingError("-sc", rule)
    names = _names()
    command = names[0]
    line = os.environ.get("COMP_LINE", "")
    if arguments[0].startswith("query="):
        _, _, typed = line.lstrip().partition(" ")
        command, space, settings = typed.lstrip().partition(" ")
        if not space:
            print(*(known for known in names if known.startswith(command)))
        if not space or command not in with_settings():
            return
        os.environ["COMP_LINE"] = f"harness {settings}"
    invocation.run_hydra(Words([command, "-sc", *arguments]))


def _usage() -> str:
    """The list of commands."""
    listed = commands()
    margin = max(len(command.name) for command in listed) + 4
    lines = []
    for command in listed:
        summary = f"  {command.name}".ljust(margin) + command.summary
        lines += textwrap.wrap(summary, terminal_width(), subsequent_indent=" " * margin)
        lines.append(f"{' ' * margin}harness {command.name} {command.example}")
    begin = _BEGIN_WITHOUT_MODELS if missing_local() else _BEGIN
    return _USAGE.format(commands="\n".join(lines), begin=begin)


def _names() -> list[str]:
    """The names of all commands that need no file, in the order of the list: the first is meant where none is typed."""
    return [command.name for command in commands()]


def _known(command: str, known: Collection[str]) -> str:
    """The command, if it is one of these or in a file of the user's.

    Raises:
        SettingError: it is neither.
    """
    if not isinstance(command, str):
        raise SettingError("command", f"must be one of {', '.join(known)}", command)
    if command not in known and not COMMANDS.is_in_file(command):
        if command in _names():
            raise SettingError(command, f"is a command of the terminal: harness {command}")
        rule = f"no such command{nearest(command, known)}; there are: {', '.join(known)}"
        raise SettingError(command, rule)
    return command


@dataclass
class _Invocation:
    """A command as it is called once, and its outcome.

    Attributes:
        quiet: whether errors are only noted here, for `run` to raise; otherwise they are printed, too.
        servers: the commands behind `--`.
        rows: of the run, or of the sweep's jobs.
        exit_codes: of the errors, and of the sweep. The process ends with the worst of them.
    """

    quiet: bool = False
    servers: Sequence[Sequence[str]] = ()
    rows: Sequence[RunRow] = ()
    errors: list[Exception] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def run_hydra(self, words: Words) -> None:
        """Run a command that has settings, once or as a sweep."""
        from harness.cli.manifest import SweepCallback, round_overrides
        from harness.cli.menu import config_source, conversion, help, names, server_words, typed

        config_source.register()
        command, *typed_words = words.typed
        self.servers = words.servers
        # Shell completion is for the program as a whole: its first word is the command.
        line = ["harness", *typed_words]
        # What is printed in place of a run comes at the end: an error of stdout must not pass for one of Hydra's.
        printed: io.StringIO | None = None
        if "-sc" not in typed_words:
            with self.reporting(command):
                known = conversion.setting_hints(configured(command).settings)
                options, settings, topic = typed.for_hydra(typed_words, command, known)
                settings += server_words.server_settings(words.servers, settings, command)
                flags = hydra_app.flags(options)
                if len(words.servers) > 2 and not flags.multirun:
                    options.append("-m")
                    flags = hydra_app.flags(options)
                if flags.help:
                    text = help.command_help(configured(command), settings, topic, flags.config_dir)
                elif flags.cfg or flags.info or flags.hydra_help:
                    printed = io.StringIO()
                elif rounds := round_overrides(command, settings):
                    settings = [*rounds, *settings]
                    options += [] if flags.multirun else ["-m"]
                # Hydra takes its options before or after all settings, but not among them.
                line = [f"harness {command}", *options, *settings]
            if self.errors:
                return
            if flags.help:
                print(text)
                return
        called = hydra_app.calling(self.run_job, line, names.CONF, names.primary(command))
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
            if sweep is not None and configured(command).sweeps:
                from harness.cli import jobs

                is_refused = any(isinstance(error, SettingError) for error in self.errors)
                self.rows, exit_code = jobs.finish(
                    command, sweep, is_refused=is_refused, is_interrupted=is_interrupted
                )
                self.exit_codes.append(exit_code)
            if printed is not None:
                print(printed.getvalue(), end="")
        began = sweep is not None or printed is not None or "-m" not in line
        if configured(command).sweeps and not began and not self.errors:
            # What kept it from beginning is an error of its jobs, which a launcher runs in other processes.
            with self.reporting(command):
                raise RunError("the sweep could not begin; the same without +launcher= says why")

    def run_job(self, config: Any) -> None:
        """Run what Hydra composed, once or for each job of a sweep.

        An error is reported here and counts for the exit code, so that the other jobs of a sweep run. A launcher may
        call a copy of this in another process.

        Args:
            config: the composed configuration.
        """
        from harness.cli import composed

        reporting = self.reporting(str(config.get("command")))
        with reporting, signals.within_time_limit():
            self.rows = composed.run(config, self.servers)

    @contextmanager
    def reporting(self, command: str) -> Iterator[None]:
        """Note an error in the block, and print it in a line or two; raise it where a traceback was asked for."""
        try:
            yield
        except BrokenPipeError:
            raise
        except Exception as error:
            if hydra_app.WANTS_TRACEBACK:
                raise
            mistake = error if isinstance(error, HarnessError) else None
            if mistake is None and (command in with_settings() or COMMANDS.is_in_file(command)):
                from harness.cli.menu import hydra_errors

                # The mistake that Hydra or OmegaConf found in the overrides, if it is one.
                mistake = hydra_errors.explained(error, command)
            self.errors.append(mistake or error)
            self.exit_codes.append(mistake.exit_code if mistake else 1)
            # Many jobs of a sweep may fail with the same error, which is printed once.
            is_printed = str(mistake or error) in map(str, self.errors[:-1])
            if not self.quiet and not is_printed:
                message = visible(f"harness: {mistake or in_one_line(error)}")
                print(message, file=sys.stderr, flush=True)


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
