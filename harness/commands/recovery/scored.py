"""Answers to the requests of a run against exact probabilities: the test of `recovery`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.commands.recovery.drawn import TokenResult, TokenTest
from harness.commands.recovery.greedy import Columns
from harness.commands.recovery.reported import TOLERANCE, RegularReference, ReturnedLogprobs
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import Scores, choose_place
from harness.commands.recovery.workload import Answer, Asking, most_drawn, tokens_at_place
from harness.config.amounts import counted
from harness.config.errors import RunError
from harness.engines.door.reference import TextReference
from harness.engines.protocol import Arm, in_batches
from harness.measuring.acceptance import acceptance_columns
from harness.measuring.progress import say
from harness.results.acceptance import Acceptance

# The share of drawn tokens that follow the one place.
_SHARE_AT_PLACE = 0.5
# Returned log-probabilities may differ by this at least from those of a regular server.
_LEAST_TOLERANCE = 0.01
# Drawn tokens of `num_draws=auto` at least.
_FEWEST_TOKENS = 2000
_now = time.monotonic
# A fall of acceptance is no loss: the chance that a run names one that is none.
_DRIFT_LEVEL = 1e-3
# After so many parts of the second round it is asked whether the arm is known to be lossy.
_NUM_LOOKS = 4


@dataclass(frozen=True)
class _Scored:
    """The results of one arm.

    Attributes:
        answers: to all requests.
        overall: of all drawn tokens; None where nothing was drawn.
        checks: of greedy texts, of the tokens of each sampling setting, and of all of these.
    """

    scores: Scores
    answers: Sequence[Answer]
    overall: TokenResult | None
    checks: Sequence[Columns]

    @property
    def is_lossy(self) -> bool:
        return any(check["verdict"] == "lossy" for check in self.checks)


class _Test:
    """Asks arms and scores their answers, in one round of the same questions.

    Attributes:
        number: of the round, from 1.
        so_far: the results until the last look; None before the first round has ended.
    """

    def __init__(self, asking: Asking, reference: TextReference, number: int = 1) -> None:
        self.number = number
        self.so_far: _Scored | None = None
        self._asking = asking
        self._reference = reference
        settings = asking.settings
        decoding = settings.decoding
        # Of each setting, and of all together.
        num_tests = len(asking.samplings) + 1
        rate = settings.false_alarm_rate
        if settings.minutes:
            # Over all rounds, however many there are, the sum is half of the rate. The other half is that of all
            # of them together.
            rate /= 2 * number * (number + 1)
        self._token_test = TokenTest(rate / num_tests, settings.shift)
        self._mean_length = (1 + most_drawn(decoding.max_new_tokens)) / 2
        self._tokens_at_place = tokens_at_place(decoding)
        self._num_tokens = 0
        self._num_needed: int | None = None
        if asking.samplings:
            self._num_needed = self._needed()
            # Where no number is enough, more draws would change nothing.
            self._num_tokens = max(_FEWEST_TOKENS, self._num_needed or 0)
            if settings.num_draws != "auto":
                self._num_tokens = settings.num_draws
            if number > 1:
                self._num_tokens = min(self._num_tokens, _FEWEST_TOKENS)

    def _needed(self) -> int | None:
        """Drawn tokens that are enough for a verdict, with the first ones of texts."""
        number = self._token_test.needed()
        if number is None:
            return None
        lengths = self._mean_length, self._tokens_at_place
        shares = 1 - _SHARE_AT_PLACE, _SHARE_AT_PLACE
        num_texts = sum(share / length for share, length in zip(shares, lengths, strict=True))
        # The lengths of texts are random.
        return math.ceil(1.05 * number / max(1 - num_texts, 0.01))

    def scored(self, arm: Arm) -> _Scored:
        """Ask an arm two rounds, the second one after answers of the first, and score its answers."""
        asking = self._asking
        settings = asking.settings
        reference = self._reference
        num_in_flight = settings.batch_size
        tested = "greedy texts"
        if asking.samplings:
            num_settings = counted(len(asking.samplings), "sampling setting")
            tested += f" and {self._num_tokens:,} drawn tokens over {num_settings}"
        if self.number == 1:
            say(f"testing the {arm.name} arm with {tested}, {num_in_flight} in flight")
        num_mixed = math.ceil((1 - _SHARE_AT_PLACE) * self._num_tokens / self._mean_length / 2)
        num_at_place = math.ceil(_SHARE_AT_PLACE * self._num_tokens / self._tokens_at_place)
        num_together = min(num_in_flight, 8)
        scores = Scores(reference, asking.end_tokens, num_together, [settings.seed, self.number])
        workload = asking.workload(self.number)
        first = asking.ask(arm, workload.first_turns(num_mixed), num_in_flight, "asking")
        scores.add(_drawn(first))
        at_place = []
        # Of the run's own sampling setting.
        own = [text for text in scores.drawn if text.request.sampling in asking.samplings[:1]]
        if own:
            place = choose_place(own, reference, num_together)
            at_place = workload.at_place(place, num_at_place)
        learns_rounding = isinstance(reference, RegularReference) and arm is reference.arm
        if not learns_rounding:
            scores.add(_greedy(first))
            # Where the run is interrupted, nothing more can be asked of the reference.
            self.so_far = self._scored(scores, first)
        further = workload.second_turns(first, num_mixed, at_place)
        answers = [*first]
        for requests in in_batches(further, max(1, math.ceil(len(further) / _NUM_LOOKS))):
            second = asking.ask(arm, requests, num_in_flight, "asking, second turns")
            answers += second
            scores.add(_drawn(second))
            if not learns_rounding:
                scores.add(_greedy(second))
                self.so_far = self._scored(scores, answers)
                # Bets are valid at any time: what is known needs no more.
                if self.so_far.is_lossy:
                    return self.so_far
        if isinstance(reference, RegularReference) and learns_rounding:
            reference.learn_rounding(_texts(answers), scores.returned)
            scores.add(_greedy(answers))
        return self._scored(scores, answers)

    def _scored(self, scores: Scores, answers: Sequence[Answer]) -> _Scored:
        checks = [scores.greedy.columns()]
        if not self._asking.samplings:
            return _Scored(scores, answers, None, checks)
        *parts, overall = check_drawn(scores, self._asking.samplings, self._token_test)
        records = [answer.record for answer in answers]
        # Without rejections much of the algorithm never ran.
        outcomes = (outcome for record in records for outcome in record.outcomes)
        of_all: Columns = {"acceptance": Acceptance.of(outcomes)}
        # Of servers that report it without iterations.
        acceptance_rate = acceptance_columns(records)["acceptance_rate"]
        if acceptance_rate is not None:
            of_all["acceptance_rate"] = acceptance_rate
        if overall.verdict == "undecided":
            of_all["num_draws_needed"] = self._num_needed
        named = zip(self._asking.samplings, parts, strict=True)
        checks += [part.columns("setting", sampling.name) for sampling, part in named]
        checks.append(overall.columns("sampled", **of_all))
        return _Scored(scores, answers, overall, checks)


def check_drawn(
    scores: Scores, samplings: Sequence[Sampling], token_test: TokenTest
) -> list[TokenResult]:
    """The results of the drawn texts of each sampling setting, and last of all together."""
    rounding = scores.rounding()
    parts = [
        [text for text in scores.drawn if text.request.sampling == sampling]
        for sampling in samplings
    ]
    return [token_test.check(texts, rounding) for texts in (*parts, scores.drawn)]


def _drawn(answers: Sequence[Answer]) -> list[Answer]:
    """Those to drawn requests that somebody waited for."""
    return [one for one in answers if one.request.is_compared and not one.request.is_greedy]


def _greedy(answers: Sequence[Answer]) -> list[Answer]:
    """Those to greedy requests; a text that nobody waited for is not compared."""
    return [one for one in answers if one.request.is_greedy and one.request.is_compared]


def _texts(answers: Sequence[Answer]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Prompts and texts, as `Arm.scores` takes them, of those that somebody waited for."""
    waited_for = [one for one in answers if one.request.is_compared and one.record.token_ids]
    return [(one.request.prompt, one.record.token_ids) for one in waited_for]


def scored_checks(asking: Asking, arm: Arm, reference: TextReference) -> Iterator[Columns]:
    """Test an arm's answers by exact probabilities; before that the arm that is the reference.

    Raises:
        RunError: log-probabilities that came with tokens are wrong.
    """
    settings = asking.settings
    began = _now()
    test = _Test(asking, reference)
    returned: list[Columns] = []
    tolerance = TOLERANCE
    if isinstance(reference, RegularReference):
        regular = reference.arm
        own = test.scored(regular)
        yield _reference_check(regular, own)
        if own.is_lossy:
            return
        returned += _returned_check(regular, own.scores.returned, tolerance)
        tolerance = max(_LEAST_TOLERANCE, reference.rounding)
    try:
        scored = test.scored(arm)
    except KeyboardInterrupt:
        yield from _interrupted(test.so_far)
        raise
    yield from scored.checks
    returned += _returned_check(arm, scored.scores.returned, tolerance)
    yield from returned
    if settings.minutes and not scored.is_lossy:
        yield from _rounds(asking, arm, reference, scored, began)
    wrong = [f"{one['arm']}: {one['finding']}" for one in returned if one["verdict"] == "wrong"]
    if wrong:
        about = f"log-probabilities that came with tokens are wrong: {'; '.join(wrong)}"
        if not scored.is_lossy:
            raise RunError(about)
        say(about)


def _rounds(
    asking: Asking, arm: Arm, reference: TextReference, first: _Scored, began: float
) -> Iterator[Columns]:
    """Ask the same questions in rounds until the time is over, a round is lossy, or enough is known."""
    settings = asking.settings
    ends = began + 60 * settings.minutes
    test_of_all = TokenTest(settings.false_alarm_rate / 2, settings.until or settings.shift)
    texts = [*first.scores.drawn]
    num_requests = len(first.answers)
    usual = _drafts(asking, first)
    for number in itertools.count(2):
        started = _now()
        if started >= ends:
            return
        scored = _Test(asking, reference, number).scored(arm)
        drafts = _drafts(asking, scored)
        fell = has_fallen(usual, drafts, _DRIFT_LEVEL / (number * (number + 1)))
        texts += scored.scores.drawn
        together = test_of_all.check(texts, first.scores.rounding()) if texts else None
        is_lossy = scored.is_lossy or (together is not None and together.verdict == "lossy")
        [columns, *_] = scored.checks
        if scored.overall is not None and together is not None:
            columns |= scored.overall.columns("round", visible_shift=together.visible)
        yield columns | {
            "check": "round",
            "round": number,
            "num_requests": num_requests,
            "elapsed_s": started - began,
            "verdict": "lossy" if is_lossy else "lossless",
            "acceptance_rate": _rate(drafts),
            "finding": f"acceptance was {_rate(usual):.0%}" if fell else None,
        }
        is_known = together is not None and together.verdict != "undecided"
        if is_lossy or (settings.until is not None and is_known):
            return
        num_requests += len(scored.answers)


# (num_proposed, num_accepted) by prompt and length, of greedy texts.
Drafts = dict[tuple[tuple[int, ...], int], tuple[int, int]]


def _drafts(asking: Asking, scored: _Scored) -> Drafts:
    prompts = set(map(tuple, asking.prompts))
    found: Drafts = {}
    for answer in _greedy(scored.answers):
        proposed, accepted = answer.record.draft_tokens
        if proposed and answer.request.prompt in prompts:
            found[answer.request.prompt, answer.request.num_tokens] = proposed, accepted
    return found


def _rate(drafts: Drafts) -> float | None:
    proposed = sum(each for each, _ in drafts.values())
    return sum(each for _, each in drafts.values()) / proposed if proposed else None


def has_fallen(usual: Drafts, drafts: Drafts, level: float) -> bool:
    """Whether the same greedy questions are accepted less than before: a sign test of those that differ."""
    from scipy import stats

    num_lower = num_higher = 0
    for key, (proposed, accepted) in drafts.items():
        usual_proposed, usual_accepted = usual.get(key, (0, 0))
        difference = accepted * usual_proposed - usual_accepted * proposed
        num_lower += difference < 0
        num_higher += difference > 0
    return bool(stats.binom.sf(num_lower - 1, num_lower + num_higher, 0.5) < level)


def _interrupted(so_far: _Scored | None) -> Iterator[Columns]:
    """What had been found when the run was interrupted: a loss, or nothing that decides."""
    if so_far is None:
        say("no verdict: nothing was compared before the interruption")
        return
    for columns in so_far.checks:
        is_lossy = columns["verdict"] == "lossy"
        yield columns | {"verdict": "lossy" if is_lossy else "undecided"}


def _reference_check(arm: Arm, own: _Scored) -> Columns:
    """Whether a regular arm's texts follow the log-probabilities that it reports of them."""
    columns = {**own.checks[0]}
    del columns["temperature"]
    smallest = None
    if own.overall is not None:
        columns |= own.overall.columns("reference")
        smallest = min(
            check["p_value"] or 1.0 for check in own.checks if check["check"] == "setting"
        )
    finding = None
    if own.is_lossy:
        found = (
            f"greedy texts: {columns['identical_prompts']} of {columns['num_prompts']} identical"
        )
        if smallest is not None:
            found += f"; of drawn tokens the smallest p-value is {smallest:.2g}"
        finding = (
            "the regular server is no reference: its own texts do not follow the log-probabilities"
            f" that it reports of them ({found})"
        )
    return columns | {
        "check": "reference",
        "arm": arm.name,
        "verdict": "undecided" if own.is_lossy else "lossless",
        "finding": finding,
        "p_value": smallest,
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
