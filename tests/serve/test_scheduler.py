"""The scheduler over an arm that works ahead of the host: every answer is what it is alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from chains import RAGGED, chain, request, texts
from fakes import MarkovRunner
from harness.decoding.batch import Records, Request
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.protocols import Step
from harness.decoding.warp import BatchWarp, Warp
from harness.drafting.model import ModelDrafter

pytest.importorskip("fastapi", reason="harness[serve] is not installed")

from harness.serve.scheduler import Scheduler

WARP = Warp(0.9)


class JoinedRunner(MarkovRunner):
    """A table that rows may join."""

    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        assert self._num_extended == 0
        self.rows += [list(prompt) for prompt in prompts]
        return Step(self._logits[torch.tensor([prompt[-1] for prompt in prompts])])


class Arm:
    """Decodes requests, which are the questions, with as many draft tokens as given."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._number = num_draft_tokens

    def request(self, question: Request) -> Request:
        return question

    def stream(self, question: Request) -> Records:
        target = JoinedRunner(chain(0))
        if not self._number:
            return autoregressive(target, question, ahead=True)
        warp = BatchWarp()
        drafter = ModelDrafter(JoinedRunner(0.5 * chain(0) + 0.5 * chain(1)), warp)
        return speculative(target, drafter, question, self._number, warp=warp, ahead=True)


@dataclass(eq=False)
class Taken:
    """An answer of tokens alone, which its reader may leave after some of them."""

    question: Request
    most: int
    arm: str = "arm"
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, tokens: list[int], num_proposed: int, num_accepted: int) -> bool:
        self.tokens += tokens
        has_stopped = self.tokens[-1] in self.question.stop_tokens
        if has_stopped or len(self.tokens) >= min(self.most, self.question.max_new_tokens):
            self.ended.set()
        return self.ended.is_set()

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_answers_that_join_and_leave_behind_queued_turns(num_draft_tokens: int) -> None:
    arm: Any = Arm(num_draft_tokens)
    scheduler = Scheduler(lambda name: arm, max_rows=3, max_waiting=20)
    answers: list[Any] = []
    for index in range(10):
        prompts = [RAGGED[index % len(RAGGED)]]
        question = request(prompts, WARP, 12 + 5 * (index % 4), [[], [8]][index % 2], [index])
        answers.append(Taken(question, most=9 if index % 3 == 0 else 1000))
    for answer in answers:
        scheduler.submit([answer])
    for answer in answers:
        assert answer.ended.wait(timeout=900)
    scheduler.close()
    for answer in answers:
        (alone,) = texts(arm.stream(answer.question), 1)
        assert answer.tokens == alone[: len(answer.tokens)]
        assert len(answer.tokens) == len(alone) or len(answer.tokens) >= answer.most
