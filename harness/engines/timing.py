"""Asks an arm a question. Garbage is not collected while the arm answers, and the peak memory is that of this question
only.

The arm takes the times. All figures of speed are computed from its result, an `Answered`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from harness.config.amounts import counted
from harness.config.errors import RunError
from harness.engines.protocol import Answered, Arm, Engine, Question


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and do not collect it again while the block is executed."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def quick_garbage_collections() -> Iterator[None]:
    """Exempt all objects that exist now from garbage collection while the block is executed.

    Without this, the collection before each timed region would search all objects that the libraries have made. That
    takes longer than many of the timed regions. The exemption ends with the block, so that the models of a run can be
    freed after it.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def timed_answer(
    engine: Engine,
    arm: Arm,
    question: Question,
    *,
    allow_failures: bool = False,
) -> Answered:
    """Return an arm's answer to a question, with the arm's name, the question and the peak of the GPUs' memory.

    Args:
        allow_failures: whether single requests may fail. The error of a failed request is in its record.

    Raises:
        SettingError: the arm does not support a parameter that the requests need.
        RunError: a request failed although `allow_failures` is False; or as from `Arm.answer`.
    """
    requests = question.requests
    in_flight = question.in_flight or len(requests)
    if engine.weights is not None:
        engine.weights.reset_peak_memory()
    with without_garbage_collection():
        answered = arm.answer(requests, in_flight, question.extra)
    answered.arm = arm.name
    answered.question = question
    if engine.weights is not None:
        answered.peak_memory_bytes = engine.weights.peak_memory_bytes()
    errors = [str(request.error) for request in answered.requests if request.error is not None]
    if errors and not allow_failures:
        count = f"{len(errors)} of {counted(len(requests), 'request')}"
        raise RunError(f"{arm.name}: {count} failed: {errors[0]}")
    return answered
