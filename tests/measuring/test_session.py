"""A session: its rows, how long work still takes, and which answers a reference is for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.commands.latency.record import LatencySettings
from harness.commands.plan.record import PlanSettings
from harness.commands.plan.rows import PlanRow
from harness.config.engines import EngineSettings
from harness.engines.protocol import Traits
from harness.measuring import progress as progress_module
from harness.measuring.progress import in_words, progress
from harness.measuring.references import References
from harness.measuring.rows import LatencyRow
from harness.measuring.session import Session
from harness.servers.settings import ServerSettings
from some_settings import settings_of

UNKNOWN = "no_such_column"


@pytest.fixture
def session(tmp_path: Path) -> Session:
    settings = settings_of(PlanSettings, draft=None, weights="random")
    return Session(SimpleNamespace(settings=settings), settings, tmp_path)


def test_a_circumstance_without_a_column_is_an_error_of_the_program(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = "harness.measuring.session.environment_columns"
    monkeypatch.setattr(environment, lambda devices: {UNKNOWN: 1})
    with pytest.raises(TypeError, match=UNKNOWN):
        session.row(PlanRow)


def test_the_k_of_a_run_is_that_of_its_speculative_arm(tmp_path: Path) -> None:
    settings = settings_of(LatencySettings, weights="random")
    run = Session(SimpleNamespace(settings=settings), settings, tmp_path)
    rows = [run.row(LatencyRow, arm=arm) for arm in ("regular", "speculative")]
    assert [row.num_draft_tokens for row in rows] == [None, settings.decoding.num_draft_tokens]


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


def test_the_bar_says_what_is_left_after_the_step_behind_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [0.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: times[-1]))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress("drawing", 22) as advance:
        for seconds in (500.0, 530.0):
            times.append(seconds)
            advance(None)
    shown = capsys.readouterr().err
    assert "1/22 · drawing" in shown
    assert shown.count("left") == 1
    assert "2/22 · drawing · about 10 minutes left" in shown
    assert [in_words(seconds) for seconds in (40, 600, 9000)] == ["40 s", "10 minutes", "2.5 hours"]


def test_without_a_terminal_long_work_says_once_a_minute_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [0.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: times[-1]))
    monkeypatch.setattr(progress_module, "_last_line", 0.0)
    with progress("drawing", 22) as advance:
        for seconds in (30.0, 59.0, 61.0, 90.0, 122.0):
            times.append(seconds)
            advance(None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" · ")[0] for line in lines] == ["drawing: 3 of 22", "drawing: 5 of 22"]


URL = "http://localhost:8000/v1"
GRAMMAR = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("settings", "reports_token_ids", "has_tokens", "has_texts"),
    [
        (EngineSettings(), True, True, True),
        (ServerSettings(url=URL), False, False, True),
        # The model's distribution after a text is none of the chat that a server makes of it.
        (ServerSettings(url=URL, chat=True), True, False, False),
        (ServerSettings(url=URL, extra=GRAMMAR), True, False, False),
    ],
)
def test_a_reference_is_for_what_the_model_read(
    settings: EngineSettings, reports_token_ids: bool, has_tokens: bool, has_texts: bool
) -> None:
    own = object()
    arm = SimpleNamespace(traits=Traits(reports_token_ids=reports_token_ids))
    engine: Any = SimpleNamespace(weights=SimpleNamespace(reference=own), arms=[arm])
    run: Any = SimpleNamespace(engine=settings)
    planned: Any = None
    references = References(run, planned, engine)
    assert references.for_tokens() is (own if has_tokens else None)
    assert references.for_texts() is (own if has_texts else None)
