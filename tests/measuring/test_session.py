"""Rows as a session makes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.commands.plan.record import PlanSettings
from harness.commands.plan.rows import PlanRow
from harness.measuring.session import Session
from some_settings import settings_of

UNKNOWN = "no_such_column"


@pytest.fixture
def session(tmp_path: Path) -> Session:
    settings = settings_of(PlanSettings, draft=None, weights="random")
    return Session(SimpleNamespace(settings=settings), settings, tmp_path)


def test_a_circumstance_without_a_column_is_an_error_of_the_program(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "harness.measuring.session.environment_columns", lambda devices: {UNKNOWN: 1}
    )
    with pytest.raises(TypeError, match=UNKNOWN):
        session.row(PlanRow)


def test_so_is_a_figure_without_one(session: Session) -> None:
    with pytest.raises(TypeError, match=UNKNOWN):
        session.row(PlanRow, **{UNKNOWN: 1})


def test_all_others_are_in_the_row(session: Session) -> None:
    row = session.row(PlanRow, read_bytes=3)
    assert (row.run, row.status, row.read_bytes) == (session.run, "ok", 3)


def test_an_error_without_a_message_has_its_name(session: Session) -> None:
    with pytest.raises(ZeroDivisionError), session.watch():
        raise ZeroDivisionError
    assert (session.status, session.error) == ("failed", "ZeroDivisionError")


def test_a_failure_is_noted_even_where_explaining_it_fails(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with status ok and no prompt were written where an import failed."""

    def no_module(exception: BaseException) -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr("harness.config.failures.as_run_error", no_module)
    with pytest.raises(ModuleNotFoundError), session.watch():
        raise ValueError("what  is\nwrong")
    assert (session.status, session.error) == ("failed", "what is wrong")
