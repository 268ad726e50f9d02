"""Asks both arms the same questions, in turns; used by every command that compares arms."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from harness.config.errors import RunError
from harness.engines.protocol import Arm, Engine, Question
from harness.engines.timing import Generation, generate, quick_garbage_collections
from harness.measuring.pace import Pace
from harness.measuring.progress import progress, say
from harness.measuring.session import Session
from harness.results.locked_files import append_lines

# Seconds before each lap of an engine that keeps requests in flight. File writes between laps
# differ before the two arms, and slow the next requests: without a rest the first tokens of one of
# two identical arms came 0.25 ms later (`benchmarks/identical_arms.py`).
_REST_S = 0.02

# The answers to one question by the name of the arm.
Answers = dict[str, Generation]


def ask_all(
    session: Session,
    questions: Sequence[Question],
    after_question: Callable[[Question, Answers], str | None] = lambda question, answers: None,
    warmups: Sequence[Question] = (),
    *,
    arms: Sequence[Arm] | None = None,
    allow_failures: bool = False,
    after_warmup: Callable[[str], None] = lambda arm: None,
    after_answer: Callable[[Question, Answers], None] = lambda question, answers: None,
    question_for: Callable[[Question, str], Question] = lambda question, arm: question,
    is_enough: Callable[[], bool] = lambda: False,
) -> dict[str, list[Generation]]:
    """Give every arm of the engine, or each of `arms`, every question, in turns, with a progress bar.

    For each question, for each arm: `after_warmup` if the arm had to warm up, `question_for`, the
    answer, `after_answer`. After the last arm `after_question`. Returns the answers of each arm.

    Args:
        after_answer, after_question: get the answers so far; the latter returns a text for the bar.
        warmups: what each arm answers first, unmeasured.
        allow_failures: whether a request may fail; its error is then in its record.
        after_warmup, question_for: get the name of an arm.
        is_enough: asked after every question; True leaves out those that follow.

    Raises:
        RunError: an arm was given up. Until then every question had its `after_question`.
    """
    engine = session.engine
    assert engine is not None
    arms = arms or engine.arms
    answers_by_arm: dict[str, list[Generation]] = {arm.name: [] for arm in arms}
    warm: set[str] = set()
    bar = progress("warming up" if warmups else "measuring", len(questions))
    with bar as advance, closing(Pace(len(questions), say)) as pace, quick_garbage_collections():
        for question, in_turn in zip(questions, _alternating(arms), strict=False):
            answers: Answers = {}
            for arm in in_turn:
                engine.begin_turn(arm)
                # Just before its question, because an engine may hold one arm at a time.
                if arm.name not in warm or not engine.is_loaded(arm):
                    for warmup in warmups:
                        generate(engine, arm, warmup, allow_failures=allow_failures)
                    warm.add(arm.name)
                    after_warmup(arm.name)
                own_question = question_for(question, arm.name)
                answers[arm.name] = _answer(session, engine, arm, own_question, allow_failures)
                answers_by_arm[arm.name].append(answers[arm.name])
                after_answer(question, answers)
            advance(after_question(question, answers) or "measuring")
            pace.answered()
            _check_answering(arms)
            if is_enough():
                break
    return answers_by_arm


def _answer(
    session: Session, engine: Engine, arm: Arm, question: Question, allow_failures: bool
) -> Generation:
    """Let an arm answer, and with `export=true` write its requests in the form of AIPerf."""
    if engine.queues:
        time.sleep(_REST_S)
    generation = generate(engine, arm, question, allow_failures=allow_failures)
    if session.settings.results.export:
        lines = [request.aiperf() for request in generation.requests]
        append_lines(session.directory / f"profile_export_{arm.name}.jsonl", lines)
    return generation


def _alternating(arms: Sequence[Arm]) -> Iterator[Sequence[Arm]]:
    """The arms in their order, then in reverse, and so on.

    So neither always runs after the other has warmed the caches.
    """
    return itertools.cycle([arms, arms[::-1]])


def _check_answering(arms: Sequence[Arm]) -> None:
    """Raise a RunError for an arm that gets no more requests: answers of the other arm would have
    nothing to be compared with.
    """
    for arm in arms:
        if arm.given_up is not None:
            raise RunError(f"{arm.name}: {arm.given_up}")
