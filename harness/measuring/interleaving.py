"""Asks both arms every question. The order of the arms alternates: regular first, then speculative first, and so on."""

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
    """Ask every arm of the engine, or each of `arms`, every question, and show a progress bar.

    Yields each answer when it is complete: the answers of all arms to the first question, then those to the second, and
    so on. The order of the arms is reversed with every question (ABBA). The caller's own work between two answers is
    not timed. If the caller leaves the loop early, the remaining questions are not asked.

    If the engine starts each arm several times (`Engine.blocks`), an arm is started and warmed up again before the
    first question of each `Question.moment`.

    Args:
        warmups: unmeasured questions that each arm answers first; empty for no warm-up.
        allow_failures: whether a run continues after a request has failed; the request's record then contains the
            error.
        question_for: makes an arm's own question, from the common question and the arm's name. Later turns of a
            conversation differ between the arms, because each arm continues from its own earlier answers.

    Raises:
        RunError: if an arm reports that further requests would fail (`Arm.failure`). It is raised once all arms have
            answered the current question.
        SettingError, RunError: those of `timed_answer`, at once: a RunError also for a failed request, unless
            `allow_failures`.
    """
    arms = arms or engine.arms
    # The names of the arms that have answered the warm-ups since they were started.
    warm: set[str] = set()
    # For each arm's name, the moment of the block for which the arm was started last.
    begun: dict[str, int] = {}
    failure: str | None = None
    bar = progress("warming up" if warmups else "measuring", len(questions))
    with bar as advance, quick_garbage_collections():
        # In order, then in reverse, and so on, so that neither arm always runs after the other has warmed the caches.
        orders = itertools.cycle([arms, arms[::-1]])
        for question, in_turn in zip(questions, orders, strict=False):
            for arm in in_turn:
                # An arm is started just before its question, because the devices may have room for only one arm at a
                # time. Later turns of a conversation belong to the block of its first turn.
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
                # Read now, because an arm forgets its failure when it is stopped to make room for the next arm.
                if failure is None and arm.failure is not None:
                    failure = f"{arm.name}: {arm.failure}"
            advance("measuring")
            # Raised only now, so that the other arm's answer to this question is kept. Answers to further questions
            # would have no counterpart.
            if failure is not None:
                raise RunError(failure)
