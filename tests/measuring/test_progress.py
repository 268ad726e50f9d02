"""How long work still takes, where there is no terminal for a bar."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.measuring import progress as progress_module
from harness.measuring.progress import in_words, progress


def test_without_a_bar_a_line_says_what_is_left_after_the_step_behind_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [0.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: times[-1]))
    with progress("drawing", 22) as advance:
        for seconds in (500.0, 530.0, 560.0):
            times.append(seconds)
            advance(None)
    assert capsys.readouterr().err == "drawing: about 10 minutes more\n"
    assert [in_words(seconds) for seconds in (40, 600, 9000)] == ["40 s", "10 minutes", "2.5 hours"]
