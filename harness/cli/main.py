"""Runs commands, from the command line (`main`) and from Python (`run`).

Commands without settings, such as `report`, parse their arguments themselves. For all others, `cli.typed` reads the
words, and `cli.composing` lets Hydra compose a configuration, once or for each job of a sweep. Hydra calls an
`Invocation` with each configuration. The invocation collects errors, which decide the exit code. `cli.job` makes typed
settings and runs the experiment. Torch is only imported once the settings are known to be valid.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Collection
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from harness.cli import help, signals
from harness.cli.invocation import WANTS_TRACEBACK, Invocation
from harness.config.command_line import Words
from harness.config.errors import CANNOT_TELL, SettingError, nearest

if TYPE_CHECKING:
    import pandas as pd


_INTERRUPTED = "harness: interrupted; anything measured so far is kept"
# Exit codes from the mildest to the most severe: success, a doubtful answer, a wrong setting, and a failure or a bad
# answer. If there are several, the process exits with the most severe one.
_SEVERITIES = (0, CANNOT_TELL, 2, 1)
# Options that print something instead of running a command.
_FOR_THE_TERMINAL = ("-h", "--help", "--version", "help", "-c", "--cfg")
# A process has only one Hydra and one sys.stdout, so only one thread at a time may run a command.
_run_lock = threading.RLock()


def main() -> None:
    """Entry point of `harness` and `python -m harness`.

    Exits with 0 for a good answer, 1 for a failed run or a bad answer, 2 for a wrong setting, 3 if the answer is
    doubtful, and 130 after an interruption.
    """
    _prepare_streams()
    words = Words.divide(sys.argv[1:])
    words.note()
    invocation = Invocation(words.servers)
    try:
        with signals.interrupting(_end_process):
            try:
                _answer(words, invocation)
            except SystemExit:
                # With `| head`, for example, nobody may read the last lines. Find that out here, not at exit.
                sys.stdout.flush()
                raise
            sys.stdout.flush()
    except KeyboardInterrupt:
        # The terminal may have been closed.
        with suppress(OSError):
            print(_INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if WANTS_TRACEBACK and not isinstance(error, BrokenPipeError):
            raise
        # `Invocation.reporting` lets no other error of a command through than BrokenPipeError, so this error is about
        # stdout. Discard its buffer, or flushing it at exit would fail again.
        from harness.reporting.terminal import discard

        discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            print(f"harness: stdout cannot be written: {error.strerror}", file=sys.stderr)
            invocation.exit_codes.append(1)
    sys.exit(max(invocation.exit_codes, key=_SEVERITIES.index, default=0))


def _prepare_streams() -> None:
    """Make the standard streams usable: closed ones lead to the null device, and stdout writes `?` for what it cannot
    encode.
    """
    # Occupy closed descriptors. Otherwise the next file that is opened would get the number of stdout. Each call gets
    # the lowest free number, so the loop ends with the first number above 2, which is not needed. Processes that
    # this one starts inherit the others.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _end_process() -> NoReturn:
    """End the process as a KeyboardInterrupt would, but without an exception, because a module that is being imported
    could swallow an exception.
    """
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, f"{_INTERRUPTED}\n".encode())
    os._exit(130)


def run(command: str, *overrides: str, verbose: bool = False, **settings: Any) -> pd.DataFrame:
    """Run a command from Python: `run("latency", model="7B", decoding={"num_draft_tokens": 6})`.

    The run writes the same files as a run from the command line. With `-m` among the overrides it is a sweep, in which
    a failed job becomes a row with its `status` and `error`. Calls from several threads run one after the other.

    Args:
        overrides: settings as on the command line, such as `"model=7B"`.
        verbose: whether to print the command's tables, and to show progress and messages on stderr.
        settings: settings as keywords. A keyword wins over an override of the same setting. The value for a group is
            the name of a preset, or a mapping of the group's settings.

    Returns:
        The rows of the run, or of all jobs of the sweep. The dozen columns that answer most questions come first, then
        all others that are not empty.

    Raises:
        SettingError: a setting is wrong. In a sweep, an unknown name ends it before any job runs. A wrong value of one
            job is raised after the other jobs have run, or, if only the models show that it is wrong, the job becomes a
            row with the status `refused`.
        RunError, or an unexpected error: the run failed. (Failed jobs and bad answers of a sweep raise nothing.)
        VerdictError: the run succeeded, and its answer is bad: for example, the pair is not lossless. A doubtful answer
            raises nothing; its rows contain the reason for the doubt.
    """
    from harness.cli import conversion, typed
    from harness.commands.registry import configured, with_settings
    from harness.measuring import progress
    from harness.results.schema import frame

    kind = configured(_checked(command, with_settings())).settings
    for word in overrides:
        if not isinstance(word, str):
            rule = 'must be text such as "batch_size=4", or a keyword: run("latency", batch_size=4)'
            raise SettingError("settings", rule, word)
    keywords = typed.from_keywords(settings, conversion.setting_hints(kind))
    divided = Words.divide([command, *overrides])
    divided = Words([*divided.typed, *keywords], divided.servers)
    for word in divided.typed:
        if word.partition("=")[0] in _FOR_THE_TERMINAL:
            raise SettingError(word, f"is for the command line: harness {command}")
    invocation = Invocation(divided.servers, quiet=True)
    with (
        _run_lock,
        signals.interrupting(),
        redirect_stdout(sys.stdout if verbose else io.StringIO()),
        progress.quiet(not verbose),
    ):
        divided.note()
        _answer(divided, invocation)
    for error in invocation.errors:
        if getattr(error, "exit_code", None) != CANNOT_TELL:
            raise error
    return frame(invocation.rows)


def _answer(words: Words, invocation: Invocation) -> None:
    """Run the command that the first word names, or print help or the version.

    Errors of the command are collected in `invocation`, which also gets the rows of a command with settings. Only
    errors of stdout, interruptions and the SystemExit of commands without settings are raised; with HYDRA_FULL_ERROR=1
    every error is.
    """
    # Without any word the help is printed. A command line that begins with `--` names no command, which is reported.
    command, *others = words.typed or ["--" if words.servers else "help"]
    printed = ""
    with invocation.reporting():
        if command in ("-v", "-V", "version") or "--version" in words.typed:
            printed = sys.modules["harness"].__version__
        elif asked := help.asked_for([command, *others]):
            printed = asked
        else:
            from harness.commands.command import PathCommand
            from harness.commands.registry import COMMANDS

            record = COMMANDS[_checked(command, COMMANDS.names())]
            rest = Words(others, words.servers)
            if isinstance(record, PathCommand):
                signals.load(record.program).main(rest)
            else:
                from harness.cli import composing, typed

                printed = composing.run(command, typed.read(rest, command), invocation)
    # Printed outside `reporting`, because an error of stdout is not an error of the command.
    if printed:
        print(printed)


def _checked(command: str, names: Collection[str]) -> str:
    """Return the command unchanged.

    Raises:
        SettingError: the command is not one of the names.
    """
    from harness.commands.registry import COMMANDS

    if not isinstance(command, str):
        raise SettingError("command", f"must be one of {', '.join(names)}", command)
    if command not in names:
        if command in COMMANDS.names():
            raise SettingError(command, f"is a command of the terminal: harness {command}")
        rule = f"no such command{nearest(command, names)}; there are: {', '.join(names)}"
        raise SettingError(command, rule)
    return command
