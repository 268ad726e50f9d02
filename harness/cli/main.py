"""Commands, from the command line (`main`) and from Python (`run`).

Commands without settings, such as `report`, take their arguments themselves. For all others `cli.typed` reads the
words, `cli.composing` lets Hydra compose a configuration, once or for each job of a sweep, and Hydra calls an
`Invocation` with it, which notes errors on the way: the exit code follows from them. `cli.job` makes typed settings and
runs the experiment. Torch is imported only when the settings are known to be right.
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
from harness.config.removed import REMOVED

if TYPE_CHECKING:
    import pandas as pd


_INTERRUPTED = "harness: interrupted; anything measured so far is kept"
# The worst of several exit codes counts. From the mildest: success, doubt, a wrong setting; then 1, a failure or a bad
# answer.
_SEVERITIES = (0, CANNOT_TELL, 2, 1)
# Options that print something in place of a run.
_FOR_THE_TERMINAL = ("-h", "--help", "help", "-c", "--cfg")
# The process has one Hydra and one sys.stdout, so one thread at a time may run a command.
_run_lock = threading.RLock()


def main() -> None:
    """Entry point of `harness` and of `python -m harness`. Exits with 2 for a wrong setting, 1 for a failed run."""
    _prepare_streams()
    words = Words.divide(sys.argv[1:])
    words.note()
    invocation = Invocation(words.servers)
    try:
        with signals.interrupting(_end_process):
            try:
                _answer(words, invocation)
            except SystemExit:
                # Its last lines may have no reader: `| head`.
                sys.stdout.flush()
                raise
            sys.stdout.flush()
    except KeyboardInterrupt:
        # The terminal may be gone.
        with suppress(OSError):
            print(_INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if WANTS_TRACEBACK and not isinstance(error, BrokenPipeError):
            raise
        # An error of stdout: `reporting` handles all others. Its buffer must not fail again at the exit.
        from harness.reporting.terminal import discard

        discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            print(f"harness: stdout cannot be written: {error.strerror}", file=sys.stderr)
            invocation.exit_codes.append(1)
    sys.exit(max(invocation.exit_codes, key=_SEVERITIES.index, default=0))


def _prepare_streams() -> None:
    """Make the standard streams usable: closed ones lead nowhere, and what stdout cannot encode becomes `?`."""
    # Occupies closed descriptors: else the next file that is opened would get that of stdout.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _end_process() -> NoReturn:
    """End the process as KeyboardInterrupt would, but without an exception, which an import could swallow."""
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, f"{_INTERRUPTED}\n".encode())
    os._exit(130)


def run(command: str, *overrides: str, verbose: bool = False, **settings: Any) -> pd.DataFrame:
    """Run a command from Python: `run("latency", model="7B", decoding={"num_draft_tokens": 6})`.

    It writes the same files as on the command line. With `-m` among the overrides it runs a sweep, where a job that
    fails is a row with its `status` and `error`. Calls from several threads run one after the other.

    Args:
        overrides: as on the command line, `"model=7B"`.
        verbose: also print what the command prints, and its messages and progress on stderr.
        settings: the same as keywords, after the overrides. A group takes a preset, or a mapping of its settings.

    Returns:
        The rows of the run, or of all jobs of the sweep: the dozen columns that most questions need, then all others
        that are not empty.

    Raises:
        SettingError: a setting is wrong. In a sweep, after the other jobs have run.
        RunError: the run failed.
        VerdictError: the run succeeded, with a bad answer: the pair is not lossless, for example. Where it cannot be
            told, rows are returned, and say so.
    """
    from harness.cli import conversion, typed
    from harness.commands.registry import configured, with_settings
    from harness.results.schema import frame

    kind = configured(_checked(command, with_settings())).settings
    words = [*overrides, *typed.from_keywords(settings, conversion.setting_hints(kind))]
    for word in words:
        if not isinstance(word, str):
            rule = 'must be text such as "batch_size=4", or a keyword: run("latency", batch_size=4)'
            raise SettingError("settings", rule, word)
        if word.partition("=")[0] in _FOR_THE_TERMINAL:
            raise SettingError(word, f"is for the command line: harness {command}")
    divided = Words.divide([command, *words])
    invocation = Invocation(divided.servers, quiet=True)
    from harness.measuring import progress

    stdout = sys.stdout if verbose else io.StringIO()
    with (
        _run_lock,
        signals.interrupting(),
        redirect_stdout(stdout),
        progress.quiet(not verbose),
    ):
        divided.note()
        _answer(divided, invocation)
    for error in invocation.errors:
        if getattr(error, "exit_code", None) != CANNOT_TELL:
            raise error
    return frame(invocation.rows)


def _answer(words: Words, invocation: Invocation) -> None:
    """Run the command that is named first, or print help or the version."""
    command, *others = words.typed or ["--" if words.servers else "help"]
    printed = ""
    with invocation.reporting():
        if command in ("-v", "-V", "version") or "--version" in words.typed:
            printed = sys.modules["harness"].__version__
        elif asked := help.asked_for([command, *others]):
            printed = asked
        else:
            from harness.commands.command import PathCommand
            from harness.commands.registry import COMMANDS, commands

            record = COMMANDS[_checked(command, [listed.name for listed in commands()])]
            rest = Words(others, words.servers)
            if isinstance(record, PathCommand):
                signals.load(record.program).main(rest)
            else:
                from harness.cli import composing, typed

                printed = composing.run(command, typed.read(rest, command), invocation)
    # An error of stdout is none of the command's.
    if printed:
        print(printed)


def _checked(command: str, names: Collection[str]) -> str:
    """Return the command if it has one of these names.

    Raises:
        SettingError: it has not.
    """
    from harness.commands.registry import COMMANDS

    if not isinstance(command, str):
        raise SettingError("command", f"must be one of {', '.join(names)}", command)
    if command not in names:
        if command in COMMANDS.names():
            raise SettingError(command, f"is a command of the terminal: harness {command}")
        if command in REMOVED:
            raise SettingError(command, f"is gone: {REMOVED[command]}")
        rule = f"no such command{nearest(command, names)}; there are: {', '.join(names)}"
        raise SettingError(command, rule)
    return command
