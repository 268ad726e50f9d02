"""Around an arm's answer: garbage, memory, and failures; and the seam is as small as ARCHITECTURE.md draws it."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Answered, Arm, Engine, Request
from harness.engines.requests import RequestError
from harness.engines.timing import timed_answer
from some_questions import question_of

QUESTION = question_of([[1], [2]], DecodingSettings(max_new_tokens=3))


class FakeArm(Arm):
    """Each answer is one token; `during` is called meanwhile."""

    name = "any"

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.during = during
        self.error: RequestError | None = None
        self.asked = (0, 0)

    def answer(
        self, requests: Sequence[Request], in_flight: int, extra: Sequence[Request] = (), *_: Any
    ) -> Answered:
        self.during()
        self.asked = in_flight, len(extra)
        records = [request.record() for request in requests]
        for record in records:
            record.add([7], 0.5)
        records[-1].error = self.error
        return Answered(requests=records, seconds=in_flight)


class FakeWeights:
    """Models whose calls are noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reset_peak_memory(self) -> None:
        self.calls.append("reset")

    def peak_memory_bytes(self) -> int:
        self.calls.append("read")
        return 77


def test_memory_is_that_of_one_question() -> None:
    engine: Any = Engine()
    engine.weights = FakeWeights()
    arm = FakeArm(lambda: engine.weights.calls.append("answer"))
    answered = timed_answer(engine, arm, QUESTION)
    assert engine.weights.calls == ["reset", "answer", "read"]
    assert answered.peak_memory_bytes == 77
    assert (answered.arm, answered.question, answered.tokens) == ("any", QUESTION, [[7], [7]])


def test_a_failed_request_is_an_error_where_none_may_fail() -> None:
    arm = FakeArm()
    arm.error = RequestError(500, "out of memory")
    with pytest.raises(RunError, match="any: 1 of 2 requests failed, the first with out of memory"):
        timed_answer(Engine(), arm, QUESTION)
    answered = timed_answer(Engine(), arm, QUESTION, allow_failures=True)
    assert [record.error for record in answered.requests] == [None, arm.error]


def test_garbage_is_collected_outside_the_clock() -> None:
    seen = []
    for begin in (gc.disable, gc.enable):
        begin()
        was_enabled = gc.isenabled()
        timed_answer(Engine(), FakeArm(lambda: seen.append(gc.isenabled())), QUESTION)
        assert gc.isenabled() == was_enabled
    assert seen == [False, False]


def test_prompts_are_in_flight_all_at_once_unless_a_question_says_otherwise() -> None:
    arm = FakeArm()
    kept_up = replace(QUESTION, in_flight=1, extra=QUESTION.requests[:1])
    for question, asked in ((QUESTION, (2, 0)), (kept_up, (1, 1))):
        timed_answer(Engine(), arm, question)
        assert arm.asked == asked


ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"


def test_every_name_of_the_seam_is_drawn() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    _, section = text.split("**An engine answers a question", 1)
    drawing = section.split("```")[1]
    for name, kind in (("engine", Engine), ("arm", Arm)):
        names = vars(kind).keys() | kind.__annotations__
        public = {word for word in names if not word.startswith("_")}
        assert set(re.findall(rf"\b{name}\.(\w+)", drawing)) == public
