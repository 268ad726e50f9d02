"""Lines about runs that take long."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from harness.measuring import interleaving
from harness.measuring import progress as progress_module
from harness.measuring.progress import Pace, in_words, progress
from in_process import Harness
from wording import mentions

GENEROUS_S = 900.0


class Told(list[str]):
    """Lines, and a way to wait for the first one that another thread says."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def say(self, line: str) -> None:
        self.append(line)
        self.came.set()


def test_a_first_question_without_an_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "SILENT_S", 0.01)
    told = Told()
    following = Pace(15, told.say)
    assert told.came.wait(GENEROUS_S)
    following.close()
    assert mentions(told[0], "question 1 of 15 is not answered after", "load")


def test_a_later_one_is_compared_with_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    # Both questions took no time, or what is left would be estimated first.
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    following = Pace(4, told.say)
    following.answered()
    monkeypatch.setattr(progress_module, "SILENT_S", 0.01)
    following.answered()
    assert told.came.wait(GENEROUS_S)
    following.close()
    assert mentions(told[-1], "question 3 of 4", "many times its estimate of")


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


def test_latency_follows_its_questions(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is answered when it was said that it takes long."""
    told = Told()
    original, generate = interleaving.say, interleaving.generate

    def say(line: str) -> None:
        original(line)
        if line.startswith("question 1"):
            told.say(line)

    def generate_late(*arguments: Any, **options: Any) -> Any:
        assert told.came.wait(GENEROUS_S)
        return generate(*arguments, **options)

    monkeypatch.setattr(interleaving, "say", say)
    monkeypatch.setattr(interleaving, "generate", generate_late)
    monkeypatch.setattr(progress_module, "SILENT_S", 0.01)
    outcome = harness("latency", "num_prompts=2", "decoding.max_new_tokens=4", "num_resamples=100")
    assert "question 1 of 2 is not answered after" in outcome.stderr
