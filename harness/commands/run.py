"""Runs the experiment of a command, and then writes and prints its rows, however it ended.

`cli.worker.Job` calls it for every run, whether it is a run by itself or a job of a sweep.
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
    """Run a command; write, print and return its rows, however it ends.

    A wrong setting leaves no rows, unless something was measured before it was noticed.

    Args:
        directory: directory of the run's own files.
        keeper: keeps the loaded pair from run to run; None for a single run.
        finishing: a context in which rows are made and written, while signals are postponed.
        run_id: the `run` of all rows; None for a new id.

    Returns:
        All rows that the run wrote.

    Raises:
        SettingError: if a setting is wrong by itself, or for these models.
        RunError: if the run failed, after its rows are written with everything that was measured; or if its rows cannot
            be written.
    """
    if settings.results.file:
        check_appendable(settings.results.file)
    record = measurement(command)
    experiment = record.begin(settings)
    session = Session(experiment, settings, directory, keeper, run_id)
    log = logging.getLogger("harness")
    log.info(str(Words.noted()))
    is_mistake = False
    try:
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
        if settings.results.format == "json" and (directory / NAME).is_file():
            page = None
            print((directory / NAME).read_text(encoding="utf-8"))
        try:
            if page is not None:
                print_document(in_full(page) if settings.results.details else in_short(page))
        finally:
            if saved is not None:
                say(saved)
        if write_error is not None:
            # A full disk matters more than the error that ended the run, which becomes this error's context.
            raise write_error
    # Not only `rows`: some commands write others while they measure.
    return session.written


def _rows(command: str, experiment: Experiment[Any, Any], session: Session) -> Sequence[RunRow]:
    """Return the rows of a run, however it ended."""
    try:
        return experiment.rows(session)
    except Exception:
        if session.error is None:
            raise
        # Making the rows may fail if figures are missing. A new experiment's rows hold at least the error.
        return measurement(command).begin(session.original_settings).rows(session)


def _write(
    session: Session, rows: Sequence[RunRow], page: Page | None
) -> tuple[str | None, HarnessError | None]:
    """Write the rows of a run, and its page, to files.

    Returns:
        A line that says in which files the rows are; and the error if writing failed. It is not raised, so that the
        page is still printed.
    """
    saved = None
    said = page or Page("")
    finding = [line.whole for line in said.finding]
    failure: HarnessError | None = None
    try:
        saved = session.write_rows(rows)
    except HarnessError as error:
        failure = error
    # The run's own directory gets its files even if its rows could not be added to those of all runs.
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
    """Write and return rows with the error that ended a run before it wrote any."""
    experiment = measurement(command).begin(settings)
    session = Session(experiment, settings, directory, None, run_id)
    session.status = REFUSED if isinstance(error, SettingError) else "failed"
    session.error = str(error)
    rows = experiment.rows(session)
    session.write_rows(rows)
    write_result(directory, rows, session.devices)
    _remove_own_locks(settings, directory)
    return rows


def _remove_own_locks(settings: RunSettings, directory: Path) -> None:
    """Remove the locks of the run's directory, unless the file that all runs share is in it, too."""
    shared = settings.results.file
    if shared is None or Path(shared).resolve().parent != directory.resolve():
        remove_locks(directory)
