"""Answers to the requests of a run against exact probabilities: the test of `recovery`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness.commands.recovery.scores import Scores, choose_place, is_lossy
from harness.commands.recovery.workload import Asking, Columns, most_drawn, tokens_at_place
from harness.config.amounts import counted
from harness.config.errors import RunError
from harness.engines.door.reference import Reference
from harness.engines.protocol import Arm, in_batches
from harness.measuring.progress import say
from harness.measuring.reported import ReportedReference, ReturnedLogprobs
from harness.results.statistics.drawn_tokens import TokenTest

# The share of drawn tokens that follow the one place.
_SHARE_AT_PLACE = 0.5
# Returned log-probabilities may differ by this from the weights', and by this at least from a regular server's.
_TOLERANCE = 0.1
_LEAST_TOLERANCE = 0.01
# Drawn tokens of `num_draws=auto` at least.
_FEWEST_TOKENS = 2000
# After so many parts of the second turns it is asked whether the arm is known to be lossy.
_NUM_LOOKS = 4
# Texts that are scored together.
TOGETHER = 8


class _Test:
    """Asks arms the questions of a run, and scores their answers.

    Attributes:
        so_far: the checks at the last look; none before the first turns are scored.
    """

    def __init__(self, asking: Asking, reference: Reference) -> None:
        self.so_far: Sequence[Columns] = []
        self._asking = asking
        self._reference = reference
        settings = asking.settings
        self._token_test = TokenTest(settings.false_alarm_rate, settings.shift)
        self._mean_length = (1 + most_drawn(settings.decoding.max_new_tokens)) / 2
        self._tokens_at_place = tokens_at_place(settings.decoding)
        self._num_tokens = 0
        self._num_needed: int | None = None
        if asking.samplings:
            self._num_needed = self._needed()
            # Where no number is enough, more draws would change nothing.
            self._num_tokens = max(_FEWEST_TOKENS, self._num_needed or 0)
            if settings.num_draws != "auto":
                self._num_tokens = settings.num_draws

    def _needed(self) -> int | None:
        """Drawn tokens that are enough for a verdict, with the first ones of texts."""
        number = self._token_test.needed()
        if number is None:
            return None
        num_texts = (1 - _SHARE_AT_PLACE) / self._mean_length
        num_texts += _SHARE_AT_PLACE / self._tokens_at_place
        # The lengths of texts are random.
        return math.ceil(1.05 * number / max(1 - num_texts, 0.01))

    def scored(self, arm: Arm) -> Scores:
        """Ask an arm twice, the second time after answers of the first, and score its answers."""
        asking = self._asking
        settings = asking.settings
        reference = self._reference
        num_in_flight = settings.batch_size
        tested = "greedy texts"
        if asking.samplings:
            num_settings = counted(len(asking.samplings), "sampling setting")
            tested += f" and {self._num_tokens:,} drawn tokens over {num_settings}"
        say(f"testing the {arm.name} arm with {tested}, {num_in_flight} in flight")
        num_mixed = math.ceil((1 - _SHARE_AT_PLACE) * self._num_tokens / self._mean_length / 2)
        num_at_place = math.ceil(_SHARE_AT_PLACE * self._num_tokens / self._tokens_at_place)
        num_together = min(num_in_flight, TOGETHER)
        scores = Scores(
            reference,
            asking.samplings,
            self._token_test,
            asking.end_tokens,
            num_together,
            settings.seed,
        )
        workload = asking.workload()
        first = asking.ask(arm, workload.first_turns(num_mixed), num_in_flight, "asking")
        scores.add([answer for answer in first if not answer.request.is_greedy])
        if isinstance(reference, ReportedReference) and arm is reference.arm:
            waited_for = [one for one in first if one.request.is_compared and one.record.token_ids]
            texts = [(one.request.prompt, one.record.token_ids) for one in waited_for]
            reference.learn_rounding(texts, 3 * scores.returned.rounding(_TOLERANCE))
        # By the rounding that is known now.
        scores.add([answer for answer in first if answer.request.is_greedy])
        self.so_far = scores.checks()
        at_place = []
        # Of the run's own sampling setting.
        own = [one for one in scores.drawn if one.answer.request.sampling in asking.samplings[:1]]
        if own:
            place = choose_place(own, reference, num_together)
            at_place = workload.at_place(place, num_at_place)
        further = workload.second_turns(first, num_mixed, at_place, num_in_flight)
        for requests in in_batches(further, max(1, math.ceil(len(further) / _NUM_LOOKS))):
            scores.add(asking.ask(arm, requests, num_in_flight, "asking, second turns"))
            self.so_far = scores.checks()
            # Bets are valid at any time: what is known needs no more.
            if is_lossy(self.so_far):
                break
        last = self.so_far[-1]
        if last["verdict"] == "undecided" and last["check"] == "sampled":
            last["num_draws_needed"] = self._num_needed
        return scores


def scored_checks(asking: Asking, arm: Arm, reference: Reference) -> Iterator[Columns]:
    """Test an arm's answers by exact probabilities; before that the arm that is the reference.

    Raises:
        RunError: log-probabilities that came with tokens are wrong.
    """
    test = _Test(asking, reference)
    returned: list[Columns] = []
    tolerance = _TOLERANCE
    if isinstance(reference, ReportedReference):
        regular = reference.arm
        own = test.scored(regular)
        yield _reference_check(regular, test.so_far)
        if is_lossy(test.so_far):
            return
        returned = _returned_check(regular, own.returned, tolerance)
        tolerance = max(_LEAST_TOLERANCE, reference.rounding)
        test.so_far = []
    try:
        first = test.scored(arm)
    except KeyboardInterrupt:
        # What had been found by then: a loss, or nothing that decides.
        if not test.so_far:
            say("no verdict: nothing was compared before the interruption")
        for check in test.so_far:
            verdict = "lossy" if check["verdict"] == "lossy" else "undecided"
            yield check | {"verdict": verdict}
        raise
    yield from test.so_far
    # The arm that is tested before the one that it is tested by.
    returned = [*_returned_check(arm, first.returned, tolerance), *returned]
    yield from returned
    wrong = [f"{one['arm']}: {one['finding']}" for one in returned if one["verdict"] == "wrong"]
    if wrong:
        about = f"log-probabilities that came with tokens are wrong: {'; '.join(wrong)}"
        if not is_lossy(test.so_far):
            raise RunError(about)
        say(about)


def _reference_check(arm: Arm, checks: Sequence[Columns]) -> Columns:
    """Whether a regular arm's texts follow the log-probabilities that it reports of them."""
    greedy, *drawn = checks
    columns = dict(greedy)
    # It is of both kinds of texts.
    del columns["temperature"]
    found = f"greedy texts: {greedy['identical_prompts']} of {greedy['num_prompts']} identical"
    for sampled in drawn:
        columns |= sampled
        found += f"; drawn tokens have a p-value of {sampled['p_value'] or 1.0:.2g}"
    lossy = is_lossy(checks)
    finding = (
        "the regular server is no reference: its own texts do not follow the log-probabilities"
        f" that it reports of them ({found})"
    )
    return columns | {
        "check": "reference",
        "arm": arm.name,
        "verdict": "undecided" if lossy else "lossless",
        "finding": finding if lossy else None,
    }


def _returned_check(arm: Arm, returned: ReturnedLogprobs, tolerance: float) -> list[Columns]:
    """The check of log-probabilities that an arm returned, if it returned any."""
    if not returned.returned:
        return []
    result = returned.result(arm.traits.logprobs, tolerance)
    if result is None:
        say(f"{arm.name}: log-probabilities were asked for, and none came")
        return []
    return [{"check": "logprobs", "arm": arm.name, **vars(result)}]
