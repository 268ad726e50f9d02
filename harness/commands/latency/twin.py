"""An arm that is measured against itself: how far apart two identical arms come out is the noise of
the measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from harness.decoding.protocols import Iteration
from harness.engines.protocol import Arm, Question
from harness.engines.requests import Load, RequestRecord
from harness.engines.server.counters import Counted


class Twin(Arm):
    """An arm under a second name. With `engine.aa=true` two of them take turns, as both arms of a
    run do, and the ratio of their times is in the columns `aa_ratio`.
    """

    def __init__(self, name: str, arm: Arm) -> None:
        self.name = name
        self.arm = arm
        self.tells_drafts = arm.tells_drafts

    @property
    def given_up(self) -> str | None:
        return self.arm.given_up

    @property
    def last_requests(self) -> Sequence[RequestRecord]:  # type: ignore[override]
        return self.arm.last_requests

    @property
    def last_load(self) -> Load | None:  # type: ignore[override]
        return self.arm.last_load

    def stream(self, question: Question) -> Iterator[Iteration]:
        # Otherwise a prefix cache would answer the second twin with the prompts of the first.
        salts = [f"{self.name} {salt}" for salt in question.salts]
        return self.arm.stream(dataclasses.replace(question, salts=salts))

    def counted(self) -> Counted | None:
        return self.arm.counted()
