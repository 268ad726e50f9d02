"""Asks both arms every question, in turns: regular first, then speculative first, and so on."""

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
    """Ask every arm of the engine, or each of `arms`, every question, with a progress bar.

    Yields each answer as it comes: first the answers of all arms to one question, then those to the next. The order of
    the arms is reversed with every question (ABBA). The caller's own work between answers is not timed. Breaking out of
    the loop skips the remaining questions.

    If the engine starts an arm several times (`Engine.blocks`), the arm is started anew for each `Question.moment`, and
    warmed up again.

    Args:
        warmups: unmeasured questions that each arm answers first.
        allow_failures: whether a request may fail; its record then has the error.
        question_for: gives the question for an arm, by the arm's name. Later turns of a conversation differ between
            arms, because each arm has its own earlier answers.

    Raises:
        RunError: if an arm gave up (`Arm.failure`); all arms have then answered the current question.
    """
    arms = arms or engine.arms
    warm: set[str] = set()
    begun: dict[str, int] = {}
    failure: str | None = None
    bar = progress("warming up" if warmups else "measuring", len(questions))
    with bar as advance, quick_garbage_collections():
        # In order, then in reverse, and so on, so that neither arm always runs after the other has warmed the caches.
        orders = itertools.cycle([arms, arms[::-1]])
        for question, in_turn in zip(questions, orders, strict=False):
            for arm in in_turn:
                # Begun just before its question, because an engine may be able to hold only one arm at a time. Later
                # turns of a conversation belong to the block of its first turn.
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
                # Read now: an arm that is stopped for the next one forgets its failure.
                if failure is None and arm.failure is not None:
                    failure = f"{arm.name}: {arm.failure}"
            advance("measuring")
            # Raised only now, so that the other arm's answer to this question is kept. Answers to further questions
            # would have no counterpart.
            if failure is not None:
                raise RunError(failure)
