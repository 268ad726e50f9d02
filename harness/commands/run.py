"""Runs a command: its experiment, and then its rows, however the experiment ended.

`cli.worker` calls this for every run, alone or a job of a sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from harness.results.result_file import write_result
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
    """Run a command; its rows, which are returned, are written and printed however it ends.

    Only a mistake in the settings leaves no rows, unless something was measured before it was found.

    Args:
        directory: of the run's own files.
        keeper: holds the loaded pair where several runs follow each other; None for a run alone.
        finishing: a context in which rows are made and written; of a job it postpones signals.
        run_id: that the rows carry; None for a new one.

    Raises:
        SettingError: a mistake in the settings, or one that only the models' configurations reveal.
        RunError: the run failed. Its rows, with the measurements until then, are written first.
        VerdictError: the run succeeded, and its answer is not the good one.
    """
    if settings.results.file:
        check_appendable(settings.results.file)
    experiment = measurement(command).begin(settings)
    session = Session(experiment, settings, directory, keeper, run_id)
    log = logging.getLogger("harness")
    log.info(str(Words.noted()))
    is_mistake = False
    try:
        with session.watch():
            if isinstance(settings, PromptedSettings) and (about := origin(settings.prompts)):
                # Where a prompt set comes from, and its licence.
                say(about)
            experiment.measure(session)
    except SettingError:
        is_mistake = True
        raise
    finally:
        if session.error is not None:
            log.info("%s: %s", session.status, session.error)
        with finishing():
            rows = _rows(command, experiment, session)
            if is_mistake and not any(row.has_figures for row in rows):
                rows = []
            page = None
            if rows:
                page = measurement(command).page([Run(list(rows), directory=directory)])
            if page is not None:
                page = replace(page, tables=(*page.tables, *experiment.more))
            saved, error = _write(session, rows, page)
        session.close()
        _remove_own_locks(settings, directory)
        if page is not None:
            _print(page, saved, details=settings.results.details)
        if error is not None:
            # A disk that is full is worse news than what ended the run, which is its context.
            raise error
    bad_answer = measurement(command).judge(rows)
    if bad_answer is not None:
        raise bad_answer
    # Some commands have written rows while they measured.
    return session.written


def _rows(command: str, experiment: Experiment[Any, Any], session: Session) -> Sequence[RunRow]:
    """The rows of a run, however it ended."""
    try:
        return experiment.rows(session)
    except Exception:
        if session.error is None:
            raise
        # Half a measurement may make no rows. Those of one that has not begun still say what ended it.
        return measurement(command).begin(session.original_settings).rows(session)


def _write(
    session: Session, rows: Sequence[RunRow], page: Page | None
) -> tuple[str | None, HarnessError | None]:
    """Write the rows of a run, and its page in files.

    Returns:
        A line that says where they are, and why something could not be written: the answer is known, and a disk that is
        full does not hide it.
    """
    saved = None
    finding = [] if page is None else [line.whole for line in page.finding]
    doubts = () if page is None else page.doubts
    failure: HarnessError | None = None
    try:
        saved = session.write_rows(rows)
    except HarnessError as error:
        failure = error
    # Rows that were not collected are in the run's directory, and so are its other files.
    try:
        write_result(session.directory, session.written, session.devices, finding, doubts)
        if page is not None and (full := in_full(page)):
            replace_file(session.directory / SUMMARY_FILE, as_text(full).encode())
    except HarnessError as error:
        failure = failure or error
    return saved, failure


def _print(page: Page, saved: str | None, *, details: bool) -> None:
    """Print a page, and where its rows are."""
    # The line about progress may still be on the terminal.
    show("")
    try:
        print_document(in_full(page) if details else in_short(page))
    finally:
        if saved is not None:
            say(saved)


def record_failure(
    command: str,
    settings: RunSettings,
    directory: Path,
    error: HarnessError,
    *,
    run_id: str,
) -> Sequence[RunRow]:
    """Write the rows of a run that wrote none before this error ended it."""
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
    """Remove the run's locks, unless the file that all runs share is beside them."""
    shared = settings.results.file
    if shared is None or Path(shared).resolve().parent != directory.resolve():
        remove_locks(directory)
