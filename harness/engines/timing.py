"""Asks an arm a question, without garbage collection, and with the peak memory of this question alone.

The arm takes the times; all figures of speed are computed from what it has `Answered`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from harness.config.errors import RunError
from harness.engines.protocol import Answered, Arm, Engine, Question


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and then not again within the block."""
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
    """Exempt all objects that exist now from garbage collection within the block.

    Otherwise the collection before each timed region would search everything that the libraries have made, which takes
    longer than many of these regions. The exemption ends with the block, so that a run's models do not outlive it.
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
    """Return an arm's answer to a question.

    Args:
        allow_failures: whether single requests may fail; a failed one has its error in its record.

    Raises:
        SettingError: the arm lacks a parameter that the requests need.
        RunError: a request failed and may not, or the arm cannot answer or its models returned no valid numbers.
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
        count = f"{len(errors)} of {len(requests)}"
        raise RunError(f"{arm.name}: {count} requests failed, the first with {errors[0]}")
    return answered
