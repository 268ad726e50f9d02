"""Asks both arms every question. The order of the arms alternates: regular first, then speculative first, and so on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

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

    If the engine starts each arm several times (`Engine.blocks`), answers come block by block instead. A block is made
    of consecutive questions with the same `Question.moment`. Each arm is started and warmed up again, and answers all
    questions of the block, before the next arm does. With the questions p and q in one block, and r in the next, the
    arms A and B answer Ap Aq Bp Bq Br Ar.

    Args:
        warmups: unmeasured questions that each arm answers first; empty for no warm-up.
        allow_failures: whether a run continues after a request has failed; the request's record then contains the
            error.
        question_for: makes an arm's own question, from the common question and the arm's name. Later turns of a
            conversation differ between the arms, because each arm continues from its own earlier answers.

    Raises:
        RunError: if an arm reports that further requests would fail (`Arm.failure`). The arm is asked nothing more,
            and the error is raised once the other arm has answered the same question or block.
        SettingError, RunError: raised by `timed_answer`, also in a warm-up. A failed request raises RunError unless
            `allow_failures`.
    """
    arms = arms or engine.arms
    # The names of the arms that have answered the warm-ups since they were started.
    warm: set[str] = set()
    blocks = engine.blocks
    groups = [[question] for question in questions]
    if blocks is not None:
        # A block is a question with its later turns or, for `eval`, several batches with one moment. An arm answers all
        # turns of a conversation while its server runs, because the server may have to end before the next arm's server
        # starts, and the next server has no cache of the earlier turns.
        groups = [list(block) for _, block in itertools.groupby(questions, attrgetter("moment"))]
    failure: str | None = None
    bar = progress("warming up" if warmups else "measuring", len(questions))
    with bar as advance, quick_garbage_collections():
        # In order, then in reverse, and so on, so that neither arm always runs after the other has warmed the caches.
        orders = itertools.cycle([arms, arms[::-1]])
        for group, in_turn in zip(groups, orders, strict=False):
            for arm in in_turn:
                if blocks is not None:
                    # Only now, because the devices may have room for only one arm at a time.
                    blocks.begin(arm)
                    warm.discard(arm.name)
                if arm.name not in warm:
                    for warmup in warmups:
                        timed_answer(engine, arm, warmup, allow_failures=allow_failures)
                    warm.add(arm.name)
                for question in group:
                    own_question = question_for(question, arm.name)
                    yield timed_answer(engine, arm, own_question, allow_failures=allow_failures)
                    # Read now, because an arm forgets its failure when it is stopped to make room for the next arm.
                    if arm.failure is not None:
                        failure = failure or f"{arm.name}: {arm.failure}"
                        break
            advance("measuring", len(group))
            # Raised only now, so that the other arm's answers to these questions are kept. Answers to further questions
            # would have no counterpart.
            if failure is not None:
                raise RunError(failure)
