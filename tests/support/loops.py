"""Whole requests through the loop: the records of regular and of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.engines import protocol
from harness.local.decoding.adaptive import DraftLength
from harness.local.decoding.loop import Iteration, Loop, Request, decoded
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.engine.engine import LocalArm


def autoregressive(target: Runner, request: Request) -> Iterator[Iteration]:
    return decoded(Loop(target), [request])


def speculative(
    target: Runner,
    drafter: Drafter,
    request: Request,
    num_draft_tokens: int | DraftLength,
    *options: Any,
    **named: Any,
) -> Iterator[Iteration]:
    """The options are those of `Loop`, behind K."""
    return decoded(Loop(target, drafter, num_draft_tokens, *options, **named), [request])


def records_of(arm: Any, requests: Sequence[protocol.Request]) -> Iterator[Iteration]:
    """The records of requests that share their K and rule, as an arm of our engine decides them."""
    assert isinstance(arm, LocalArm)
    with arm.explained():
        yield from decoded(arm.loop(requests[0]), [*map(arm.loop_request, requests)])
