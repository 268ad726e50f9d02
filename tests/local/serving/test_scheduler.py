"""The scheduler: every answer is what it is alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chains import GREEDY, RAGGED, SIZE, chain, request, texts
from fakes import MarkovRunner
from harness.config.errors import RunError
from harness.engines.door.serving import Refusal
from harness.local.decoding.batch import Request
from harness.local.decoding.loop import Loop, decoded
from harness.local.decoding.protocols import NonFiniteError, Step
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.serving.scheduler import Scheduler

WARP = Warp(0.9)


class JoinedRunner(MarkovRunner):
    """A table that rows may join."""

    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        assert self._num_extended == 0
        self.rows += [list(prompt) for prompt in prompts]
        return Step(self._logits[torch.tensor([prompt[-1] for prompt in prompts])])


class Arm:
    """Decodes requests with as many draft tokens as given."""

    def __init__(self, num_draft_tokens: int, transitions: Tensor | None = None) -> None:
        self._number = num_draft_tokens
        self._transitions = chain(0) if transitions is None else transitions

    def joining(self, requests: Sequence[Request]) -> Request:
        [request] = requests
        return request

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except NonFiniteError as error:
            raise RunError(str(error)) from error

    def loop(self, first: Request) -> Loop:
        target = JoinedRunner(self._transitions)
        if not self._number:
            return Loop(target)
        warp = BatchWarp()
        drafter = ModelDrafter(JoinedRunner(0.5 * chain(0) + 0.5 * chain(1)), warp)
        return Loop(target, drafter, self._number, warp=warp)


@dataclass(eq=False)
class Taken:
    """An answer of tokens alone, which its reader may leave after some of them.

    `reason` is why it failed.
    """

    arm: Any
    request: Request
    most: int
    cancelled: bool = False
    awaits_prompt: bool = False
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def remaining(self) -> Request:
        prompt = [*self.request.prompts[0], *self.tokens]
        most = self.request.max_new_tokens - len(self.tokens)
        return replace(self.request, prompts=[prompt], max_new_tokens=most)

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    def take(
        self, tokens: list[int], num_proposed: int, num_accepted: int, logprobs: list[Any]
    ) -> bool:
        self.tokens += tokens
        has_stopped = self.tokens[-1] in self.request.stop_tokens
        if has_stopped or len(self.tokens) >= min(self.most, self.request.max_new_tokens):
            self.ended.set()
        return self.ended.is_set()

    def fail(self, reason: str) -> None:
        self.reason = reason
        self.ended.set()


class LeftWhileLookedAt(Taken):
    """Its reader leaves just after the scheduler's first look at an answer that has begun."""

    has_been_looked_at = False

    @property
    def cancelled(self) -> bool:
        seen = self.has_been_looked_at
        self.has_been_looked_at = bool(self.tokens)
        return seen

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        pass


class HeldArm(Arm):
    """Sets `has_begun` when it is asked, and waits for `may_go_on`."""

    def __init__(self) -> None:
        super().__init__(0)
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def loop(self, first: Request) -> Loop:
        self.has_begun.set()
        assert self.may_go_on.wait()
        return super().loop(first)


def asked(index: int, num_tokens: int = 12) -> Request:
    return request([RAGGED[index]], WARP, num_tokens, [], [index])


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_answers_that_join_and_leave_between_turns(num_draft_tokens: int) -> None:
    arm: Any = Arm(num_draft_tokens)
    scheduler = Scheduler(max_rows=3, max_waiting=20)
    answers: list[Any] = []
    for index in range(10):
        prompts = [RAGGED[index % len(RAGGED)]]
        question = request(prompts, WARP, 12 + 5 * (index % 4), [[], [8]][index % 2], [index])
        answers.append(Taken(arm, question, most=9 if index % 3 == 0 else 1000))
    for answer in answers:
        scheduler.submit([answer])
    for answer in answers:
        assert answer.ended.wait()
    scheduler.close()
    for answer in answers:
        assert answer.reason is None
        (alone,) = texts(decoded(arm.loop(answer.request), [answer.request]), 1)
        assert answer.tokens == alone[: len(answer.tokens)]
        assert len(answer.tokens) == len(alone) or len(answer.tokens) >= answer.most


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_an_answer_whose_numbers_overflow_fails_no_other(num_draft_tokens: int) -> None:
    """Each token is followed by the next one; behind 3 the model has no numbers."""
    transitions = torch.eye(SIZE).roll(1, dims=1)
    transitions[3] = torch.nan
    arm: Any = Arm(num_draft_tokens, transitions)
    scheduler = Scheduler(max_rows=4, max_waiting=0)
    # Two overflow, at different times; two go on from 4, and end before 3.
    answers: list[Any] = []
    for first in (0, 4, 2, 5):
        question = request([[first]], GREEDY, SIZE - 3)
        answers.append(Taken(arm, question, most=SIZE - 6))
    scheduler.submit(answers)
    for answer in answers:
        assert answer.ended.wait(60)
    scheduler.close()
    broken = [answer.reason is not None for answer in answers]
    assert broken == [True, False, True, False]
    for answer in (answers[1], answers[3]):
        first = answer.request.prompts[0][0]
        expected = [(first + 1 + place) % SIZE for place in range(SIZE - 6)]
        assert answer.tokens[: SIZE - 6] == expected


def test_an_answer_left_between_two_looks_at_it_fails_no_other() -> None:
    arm: Any = Arm(0)
    scheduler = Scheduler(max_rows=2, max_waiting=0)
    stays: Any = Taken(arm, asked(0), most=1000)
    leaves: Any = LeftWhileLookedAt(arm, asked(1), most=1000)
    scheduler.submit([stays, leaves])
    assert stays.ended.wait()
    scheduler.close()
    assert stays.reason is None
    assert len(stays.tokens) == 12
    assert not leaves.ended.is_set()


def test_no_more_wait_than_may_wait_beyond_those_that_run() -> None:
    arm: Any = HeldArm()
    scheduler = Scheduler(max_rows=2, max_waiting=1)
    answers: list[Any] = [Taken(arm, asked(index), most=1000) for index in range(3)]
    scheduler.submit(answers[:2])
    assert arm.has_begun.wait()
    scheduler.submit(answers[2:])
    one_more: Any = Taken(arm, asked(0), most=1000)
    with pytest.raises(Refusal, match="at most 1 may wait"):
        scheduler.submit([one_more])
    with pytest.raises(Refusal, match="at most 1 may wait"):
        scheduler.run_alone(lambda: None)
    arm.may_go_on.set()
    for answer in answers:
        assert answer.ended.wait()
        assert answer.reason is None
    scheduler.close()


def test_as_many_wait_as_may_wait_work_that_must_be_alone_among_them() -> None:
    arm: Any = HeldArm()
    scheduler = Scheduler(max_rows=1, max_waiting=2)
    answers: list[Any] = [Taken(arm, asked(index), most=1000) for index in range(2)]
    scheduler.submit(answers[:1])
    assert arm.has_begun.wait()
    work = scheduler.run_alone(lambda: [answer.ended.is_set() for answer in answers])
    scheduler.submit(answers[1:])
    one_more: Any = Taken(arm, asked(0), most=1000)
    with pytest.raises(Refusal, match="at most 2 may wait"):
        scheduler.submit([one_more])
    arm.may_go_on.set()
    assert work.result(60) == [True, False], "before those that came later"
    for answer in answers:
        assert answer.ended.wait()
    scheduler.close()


def test_an_answer_that_joins_while_the_service_ends_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread has taken it, and decodes it only when `close` has failed all that it found."""
    arm: Any = Arm(0)
    scheduler = Scheduler(max_rows=1, max_waiting=0)
    is_taken = threading.Event()
    may_go_on = threading.Event()
    step = scheduler._batch.step
    join = scheduler._thread.join

    def step_later(joining: list[Any]) -> None:
        is_taken.set()
        assert may_go_on.wait()
        step(joining)

    def join_after_failing(grace_s: float | None = None) -> None:
        if grace_s is None:
            may_go_on.set()
        join(grace_s)

    monkeypatch.setattr(scheduler._batch, "step", step_later)
    monkeypatch.setattr(scheduler._thread, "join", join_after_failing)
    answer: Any = Taken(arm, asked(0), most=1000)
    scheduler.submit([answer])
    assert is_taken.wait()
    scheduler.close()
    assert answer.reason == "the service is ending"
