"""Asks an arm a question. No garbage is collected meanwhile, and peak memory is that of this question.

The arm takes the times; all figures of speed come from what it has `Answered`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from harness.config.errors import RunError
from harness.engines.protocol import Answered, Arm, Engine, Question


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect now, and not again until the block is left."""
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
    """Exempt what exists now from the collections within the block.

    A collection before each timed region would otherwise look through everything that the libraries
    have made, which takes longer than many of these regions. Undone at the end of the block, so
    that models of one run do not outlive it.
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
    """An arm's answer to a question.

    Args:
        allow_failures: whether requests may fail; a failed one has its error in its record.

    Raises:
        RunError: a request failed, or, from the arm, the models gave no numbers.
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
