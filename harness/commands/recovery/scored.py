"""Answers to the requests of a run against exact probabilities: the test of `recovery`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.commands.recovery.scores import Scores, choose_place, is_lossy
from harness.commands.recovery.workload import (
    Asking,
    Columns,
    PlannedRequest,
    Workload,
    most_drawn,
    tokens_at_place,
)
from harness.config.amounts import counted
from harness.engines.door.reference import Reference
from harness.engines.protocol import Arm, in_batches
from harness.measuring.progress import say
from harness.measuring.reported import ReportedReference
from harness.results.statistics.drawn_tokens import NOTABLE_EVIDENCE, p_value_in_words

# The share of drawn tokens that follow the one place.
_SHARE_AT_PLACE = 0.5
# Drawn tokens of `num_draws=auto` at least.
_FEWEST_TOKENS = 2000
# The second turns are asked in this many parts; after each, the run stops if the arm is already known to be lossy.
_NUM_LOOKS = 4


def scored_checks(asking: Asking, arm: Arm, reference: Reference) -> Iterator[Columns]:
    """Test an arm's answers by exact probabilities; before that the arm that is the reference."""
    if isinstance(reference, ReportedReference):
        regular = reference.arm
        asking_regular = replace(asking, with_logprobs=True)
        regular_scores = Scores(reference, asking_regular)
        _ask(asking_regular, regular, reference, regular_scores)
        yield _reference_check(regular, regular_scores.so_far)
        if is_lossy(regular_scores.so_far):
            return
    scores = Scores(reference, asking)
    try:
        _ask(asking, arm, reference, scores)
    except KeyboardInterrupt:
        # What had been found by then: a loss, or nothing that decides.
        if not scores.so_far:
            say("no verdict: nothing was compared before the interruption")
        for check in scores.so_far:
            verdict = "lossy" if check["verdict"] == "lossy" else "undecided"
            yield check | {"verdict": verdict}
        raise
    yield from scores.so_far


def _ask(asking: Asking, arm: Arm, reference: Reference, scores: Scores) -> None:
    """Ask an arm twice, the second time after answers of the first, and score its answers."""
    settings = asking.settings
    num_in_flight = settings.batch_size
    mean_length = (1 + most_drawn(settings.decoding.max_new_tokens)) / 2
    length_at_place = tokens_at_place(settings.decoding)
    # The first token of a text is the target's own; lengths are random.
    num_texts = (1 - _SHARE_AT_PLACE) / mean_length + _SHARE_AT_PLACE / length_at_place

    def num_needed(rounding: float) -> int:
        """Drawn tokens that are enough; 0 where no number is."""
        return math.ceil(1.05 * (asking.token_test.needed(rounding) or 0) / (1 - num_texts))

    num_tokens = max(_FEWEST_TOKENS, num_needed(rounding=0.0))
    if settings.num_draws != "auto":
        num_tokens = settings.num_draws
    tested = "greedy texts"
    if asking.samplings:
        num_settings = counted(len(asking.samplings), "sampling setting")
        tested += f" and {num_tokens:,} drawn tokens over {num_settings}"
    say(f"testing the {arm.name} arm with {tested}, {num_in_flight} in flight")
    num_mixed = math.ceil((1 - _SHARE_AT_PLACE) * num_tokens / mean_length / 2)
    workload = Workload(asking)
    first = asking.ask(arm, workload.first_turns(num_mixed), num_in_flight, "asking")
    scores.add([answer for answer in first if not answer.request.is_greedy])
    if isinstance(reference, ReportedReference) and arm is reference.arm:
        texts = [
            (answer.request.prompt, answer.record.token_ids)
            for answer in first
            if answer.request.is_compared and answer.record.token_ids
        ]
        reference.learn_rounding(texts, 3 * scores.rounding_of_drawn())
    # By the rounding that is known now.
    scores.add([answer for answer in first if answer.request.is_greedy])
    scores.look()
    at_place: Sequence[PlannedRequest] = []
    # Of the run's own sampling setting.
    drawn = [text for text in scores.drawn if text.answer.request.sampling in asking.samplings[:1]]
    if drawn:
        place = choose_place(drawn)
        # As many as the others leave, of which some end early.
        num_left = num_tokens - 2 * sum(len(scored.text.tokens) for scored in scores.drawn)
        num_at_place = math.ceil(num_left / length_at_place)
        at_place = workload.at_place(place, num_at_place)
    second = workload.second_turns(first, num_mixed, at_place, num_in_flight)
    for requests in in_batches(second, max(1, math.ceil(len(second) / _NUM_LOOKS))):
        scores.add(asking.ask(arm, requests, num_in_flight, "asking, second turns"))
        scores.look()
        # Bets are valid at any time: what is known needs no more.
        if is_lossy(scores.so_far):
            break
    last = scores.so_far[-1]
    if last["verdict"] == "undecided" and last["check"] == "sampled":
        num_enough = num_needed(last["rounding"])
        if last["evidence"] >= NOTABLE_EVIDENCE:
            num_enough = max(num_enough, 2 * last["num_draws"])
        if num_enough > max(num_tokens, last["num_draws"]):
            last["num_draws_needed"] = num_enough


def _reference_check(arm: Arm, checks: Sequence[Columns]) -> Columns:
    """Whether a regular arm's texts follow the log-probabilities that it reports of them."""
    greedy, *drawn = checks
    columns = dict(greedy)
    # The check covers greedy and drawn texts.
    del columns["temperature"]
    evidence = f"greedy texts: {greedy['identical_prompts']} of {greedy['num_prompts']} identical"
    for sampled in drawn:
        columns |= sampled
        evidence += f"; drawn tokens have a p-value of {p_value_in_words(sampled['p_value'])}"
    lossy = is_lossy(checks)
    finding = (
        "the regular server is no reference: its own texts do not follow the log-probabilities"
        f" that it reports of them ({evidence})"
    )
    return columns | {
        "check": "reference",
        "arm": arm.name,
        "verdict": "undecided" if lossy else "lossless",
        "finding": finding if lossy else None,
    }
