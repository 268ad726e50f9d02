"""Whole requests through the loop: the records of regular and of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.local.decoding.adaptive import DraftLength
from harness.local.decoding.batch import Request
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.loop import Loop, decoded
from harness.local.decoding.protocols import Drafter, Runner


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
