"""Asks both arms the same questions, in turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from harness.config.errors import RunError
from harness.engines.protocol import Answered, Arm, Engine, Question
from harness.engines.timing import quick_garbage_collections, timed_answer
from harness.measuring.progress import progress


def ask_in_turns(
    engine: Engine,
    questions: Sequence[Question],
    warmups: Sequence[Question],
    *,
    arms: Sequence[Arm] | None = None,
    allow_failures: bool = False,
    question_for: Callable[[Question, str], Question] = lambda question, arm: question,
) -> Iterator[Answered]:
    """Give every arm of the engine, or each of `arms`, every question, in turns, with a progress bar.

    Yields each answer as it comes: of one question those of all arms, then those of the next one.
    The caller's own work is not timed. Breaking out of the loop skips the rest.

    Args:
        warmups: unmeasured questions that each arm answers first.
        allow_failures: whether a request may fail; its error is then in its record.
        question_for: the question for an arm, by its name.

    Raises:
        RunError: an arm was given up.
    """
    arms = arms or engine.arms
    warm: set[str] = set()
    begun: dict[str, int] = {}
    failure: str | None = None
    bar = progress("warming up" if warmups else "measuring", len(questions))
    with bar as advance, quick_garbage_collections():
        # In their order, then in reverse, and so on: neither arm always runs after the other has
        # warmed the caches.
        orders = itertools.cycle([arms, arms[::-1]])
        for question, in_turn in zip(questions, orders, strict=False):
            for arm in in_turn:
                # Just before its question, because an engine may hold one arm at a time. The later turns of a
                # conversation belong to the block of the first.
                if engine.blocks is not None and begun.get(arm.name) != question.moment:
                    engine.blocks.begin(arm)
                    begun[arm.name] = question.moment
                    warm.discard(arm.name)
                if arm.name not in warm:
                    for warmup in warmups:
                        timed_answer(engine, arm, warmup, allow_failures=allow_failures)
                    warm.add(arm.name)
                own_question = question_for(question, arm.name)
                yield timed_answer(engine, arm, own_question, allow_failures=allow_failures)
                # Read here: an arm that is stopped for the next one forgets its failure.
                if failure is None and arm.failure is not None:
                    failure = f"{arm.name}: {arm.failure}"
            advance("measuring")
            # Only now: the other arm's answer to this question is kept, to a further one it would have no pair.
            if failure is not None:
                raise RunError(failure)
