"""Answers beside those of a regular server that reports no log-probabilities of texts, or chats, or keeps to a grammar.

Greedy texts must be the same, or, where the server sends no token ids, those that the weights write. Drawn
tokens that follow the same text are compared: twice the draws of the exact test see the same shift.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from harness.commands.recovery.drawn import TokenTest
from harness.commands.recovery.greedy import Columns, GreedyTexts
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest
from harness.engines.protocol import Arm
from harness.engines.requests import RequestRecord
from harness.measuring.progress import say
from harness.measuring.references import References
from harness.results.acceptance import Acceptance

# Tokens compared of each text, and texts of each sampling setting.
_NUM_COMPARED = 3
_NUM_TEXTS = 500


def compared_checks(
    asking: Asking, arm: Arm, regular: Arm | None, references: References
) -> Iterator[Columns]:
    """Ask an arm the requests of a run, and a regular one the same one at a time; compare the answers.

    Args:
        regular: None to compare greedy texts alone, with those that the weights write.
    """
    settings = asking.settings
    workload = asking.workload()
    samplings = [] if regular is None else asking.samplings
    # `shuffled` adds requests that are left midway.
    greedy = [
        planned for planned in workload.first_turns(0) if planned.is_greedy and planned.is_compared
    ]
    num_each = _NUM_TEXTS
    if settings.num_draws != "auto":
        num_each = math.ceil(settings.num_draws / max(1, len(samplings)))
    drawn: dict[str, list[PlannedRequest]] = {}
    for sampling, prompt in zip(samplings, itertools.cycle(asking.prompts), strict=False):
        drawn[sampling.name] = workload.repeated(prompt, sampling, num_each, _NUM_COMPARED)
    requests = workload.shuffled([*greedy, *itertools.chain(*drawn.values())])
    say(f"testing the {arm.name} arm: {len(requests):,} requests, {settings.batch_size} in flight")
    answers = asking.ask(arm, requests, settings.batch_size, "asking")
    by_index = {answer.request.index: answer.record for answer in answers}

    expected: Sequence[RequestRecord | None] = [None] * len(greedy)
    if regular is not None and references.for_texts() is None:
        expected = _records(asking.ask(regular, greedy, 1, f"asking the {regular.name} arm"))
    texts = GreedyTexts(asking.end_tokens)
    for planned, wanted in zip(greedy, expected, strict=True):
        answer = by_index[planned.index]
        texts.compare(references, planned.prompt, planned.num_tokens, answer, wanted)
    yield texts.columns()
    if regular is None or not samplings:
        return

    token_test = TokenTest(settings.false_alarm_rate / (len(samplings) + 1), settings.shift)
    samples = []
    for sampling in samplings:
        asked = drawn[sampling.name]
        # With new indices, and so with other random numbers.
        again = workload.repeated(asked[0].prompt, sampling, num_each, _NUM_COMPARED)
        doing = f"asking the {regular.name} arm, {sampling.name}"
        of_regular = _records(asking.ask(regular, again, 1, doing))
        expected_texts = [record.token_ids for record in of_regular]
        tested_texts = [by_index[planned.index].token_ids for planned in asked]
        samples.append((expected_texts, tested_texts))
        result = token_test.compare(samples[-1:], _NUM_COMPARED)
        yield result.columns("compared", sampling.name)
    outcomes = [outcome for answer in answers for outcome in answer.record.outcomes]
    result = token_test.compare(samples, _NUM_COMPARED)
    yield result.columns("sampled", acceptance=Acceptance.of(outcomes))


def _records(answers: Sequence[Answer]) -> list[RequestRecord]:
    return [answer.record for answer in answers]
