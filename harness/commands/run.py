"""Runs the experiment of a command, and then writes and prints its rows, even after an error or an interruption.

`cli.worker.Job` calls `run_command` for every run: for a single run, and for each job of a sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from harness.commands.command import Experiment
from harness.commands.registry import measurement
from harness.config.command_line import Words
from harness.config.errors import HarnessError, SettingError
from harness.config.run import PromptedSettings, RunSettings
from harness.engines.keeper import PairKeeper
from harness.measuring.progress import say, show
from harness.measuring.prompts.encoding import origin
from harness.measuring.session import Session
from harness.reporting.page import Page, in_full, in_short
from harness.reporting.terminal import as_text, print_document
from harness.results.files import SUMMARY_FILE, check_appendable
from harness.results.locked_files import remove_locks, replace_file
from harness.results.result_file import NAME, write_result
from harness.results.runs import Run
from harness.results.schema import REFUSED, RunRow


def run_command(
    command: str,
    settings: RunSettings,
    directory: Path,
    keeper: PairKeeper | None = None,
    finishing: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    run_id: str | None = None,
) -> Sequence[RunRow]:
    """Run a command, and write, print and return its rows.

    If an error or an interruption ends the run, rows with everything that was measured are written and printed before
    the error is raised. A wrong setting leaves no rows, unless something was measured before the mistake was found.

    Args:
        directory: the directory for the run's own files.
        keeper: keeps the loaded pair from run to run; None for a single run.
        finishing: a context in which signals are postponed, while rows are made and written.
        run_id: the value of the column `run` in all rows; None for a new id.

    Returns:
        All rows that the run wrote.

    Raises:
        SettingError: if a setting is wrong by itself, or for these models.
        RunError: if the run failed, or if its rows cannot be written.
        KeyboardInterrupt: if the run was interrupted.
    """
    if settings.results.file:
        check_appendable(settings.results.file)
    record = measurement(command)
    experiment = record.begin(settings)
    session = Session(experiment, settings, directory, keeper, run_id)
    log = logging.getLogger("harness")
    log.info(str(Words.noted()))
    is_mistake = False
    page = None
    saved: str | None = None
    write_error: HarnessError | None = None
    try:
        # Sets `session.status` and `session.error`, which the rows then contain.
        with session.watch():
            if isinstance(settings, PromptedSettings) and (source := origin(settings.prompts)):
                say(source)
            experiment.measure(session)
    except SettingError:
        is_mistake = True
        raise
    finally:
        if session.error is not None:
            log.info("%s: %s", session.status, session.error)
        try:
            with finishing():
                show("making the page")
                rows = _rows(command, experiment, session)
                if is_mistake and not any(row.has_figures for row in rows):
                    rows = []
                page = record.page([Run(list(rows), directory=directory)]) if rows else None
                saved, write_error = _write(session, rows, page)
                show("")
            session.close()
            _remove_own_locks(settings, directory)
        # Even a second Ctrl-C, which may arrive while servers are stopped, does not suppress the page.
        finally:
            try:
                if settings.results.format == "json" and (directory / NAME).is_file():
                    print((directory / NAME).read_text(encoding="utf-8"))
                elif page is not None:
                    print_document(in_full(page) if settings.results.details else in_short(page))
            finally:
                if saved is not None:
                    say(saved)
        if write_error is not None:
            # A full disk matters more than an error that ended the run. That error becomes this error's context.
            raise write_error
    # `written` may contain more than `rows`, because some commands write rows while they measure.
    return session.written


def _rows(command: str, experiment: Experiment[Any, Any], session: Session) -> Sequence[RunRow]:
    """Return the rows of a run, even if it ended early. An error is raised if the run had none, or if a new
    experiment cannot make rows either.
    """
    try:
        return experiment.rows(session)
    except Exception:
        if session.error is None:
            raise
        # After an error, making the rows may fail because figures are missing. A new experiment has rows without
        # figures, which contain the run's error.
        return measurement(command).begin(session.original_settings).rows(session)


def _write(
    session: Session, rows: Sequence[RunRow], page: Page | None
) -> tuple[str | None, HarnessError | None]:
    """Write the rows of a run, and its page, to files.

    Returns:
        A line that names the files with the rows (None without rows, or if writing them failed); and the error if
        writing failed (otherwise None), which is not raised, so that the page is still printed.
    """
    saved = None
    said = page or Page("")
    finding = [line.whole for line in said.finding]
    failure: HarnessError | None = None
    try:
        saved = session.write_rows(rows)
    except HarnessError as error:
        failure = error
    # The run's own directory gets its files even if the rows could not be appended to the file for all runs.
    try:
        write_result(
            session.directory,
            session.written,
            session.devices,
            finding,
            said.doubts,
            said.statements,
        )
        if page is not None and (full := in_full(page)):
            replace_file(session.directory / SUMMARY_FILE, as_text(full).encode())
    except HarnessError as error:
        failure = failure or error
    return saved, failure


def record_failure(
    command: str,
    settings: RunSettings,
    directory: Path,
    error: HarnessError,
    *,
    run_id: str,
) -> Sequence[RunRow]:
    """Write and return rows with the error that ended a run before it wrote any rows.

    Raises:
        SettingError or RunError: if the experiment cannot begin, because it refuses a setting or its prompts cannot be
            loaded; there are no rows then. Or if the rows cannot be written.
    """
    experiment = measurement(command).begin(settings)
    session = Session(experiment, settings, directory, run_id=run_id)
    session.status = REFUSED if isinstance(error, SettingError) else "failed"
    session.error = str(error)
    rows = experiment.rows(session)
    session.write_rows(rows)
    write_result(directory, rows, session.devices)
    _remove_own_locks(settings, directory)
    return rows


def _remove_own_locks(settings: RunSettings, directory: Path) -> None:
    """Remove the locks in the run's directory, unless `results.file`, which all runs share, is in this directory."""
    shared = settings.results.file
    if shared is None or Path(shared).resolve().parent != directory.resolve():
        remove_locks(directory)
