"""`recovery load=8`: tests an engine as it is used: concurrent requests of different lengths and samplings.

Two questions. Is each greedy text what the engine gives for the request alone? And are drawn tokens
distributed as the target has it, for every sampling setting that the engine takes?
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.commands.recovery.drawn import TokenTest, draws_needed, together
from harness.commands.recovery.greedy import GreedyTexts
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.regular_reference import RegularReference, regular_reference
from harness.commands.recovery.returned_logprobs import TOLERANCE
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.workload import (
    FOLLOW_UP,
    PlannedRequest,
    Workload,
    most_drawn,
    taken_samplings,
)
from harness.config.errors import RunError
from harness.engines.protocol import Arm, TextReference
from harness.engines.requests import RequestRecord
from harness.engines.timing import quick_garbage_collections
from harness.measuring.acceptance import acceptance_columns
from harness.measuring.progress import progress, say
from harness.measuring.references import References
from harness.measuring.session import Session
from harness.results.acceptance import Acceptance

# Column `sampling` of the check of pairs.
PAIRS = "neighbouring tokens"
# Without exact probabilities: tokens compared of each text, and texts of each sampling setting.
_NUM_COMPARED = 3
_NUM_ALONE = 500
# Returned log-probabilities may differ by this at least from those of a regular server.
_LEAST_TOLERANCE = 0.01
# Drawn tokens of `num_draws=auto` at least.
_FEWEST_TOKENS = 2000

Checks = Iterator[dict[str, Any]]


@dataclass
class LoadTest:
    """What an arm is tested with.

    Attributes:
        num_in_flight: requests at any time.
        samplings: sampling settings that are tested.
        refused: names of those that the engine refused; None without any.
        end_tokens: those at which the target ends a text.
    """

    settings: RecoverySettings
    num_in_flight: int
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]
    refused: str | None
    end_tokens: frozenset[int]

    def workload(self) -> Workload:
        """The requests, from the first one on."""
        settings = self.settings
        return Workload(self.prompts, self.samplings, settings.decoding, settings.seed)

    def ask(
        self,
        arm: Arm,
        planned: Sequence[PlannedRequest],
        num_in_flight: int,
        doing: str = "under load",
    ) -> list[RequestRecord]:
        """The answers in the order of the requests. Raises RunError where one failed."""
        requests = [each.request(self.settings.seed) for each in planned]
        # By their place among the requests.
        answers: dict[int, RequestRecord] = {}
        with progress(doing, len(requests)) as advance, quick_garbage_collections():
            for record in arm.under_load(requests, num_in_flight):
                answers[record.index] = record
                advance(None)
        failed = [record for record in answers.values() if record.error is not None]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(requests)} requests failed {doing}: {failed[0].error}"
            )
        return [answers[place] for place in range(len(requests))]

    def ask_in_rounds(
        self, arm: Arm, num_drawn_each: int
    ) -> tuple[list[tuple[PlannedRequest, RequestRecord]], list[RequestRecord]]:
        """Ask two rounds, the second after answers of the first. Returns all answers, and with their requests
        those that nobody left midway.
        """
        workload = self.workload()
        first = workload.first_turns(num_drawn_each)
        answers = self.ask(arm, first, self.num_in_flight)
        first_texts = [answer.token_ids for answer in answers]
        second = workload.second_turns(first, first_texts, num_drawn_each)
        answers += self.ask(arm, second, self.num_in_flight, "under load, second turns")
        asked = zip([*first, *second], answers, strict=True)
        return [pair for pair in asked if pair[0].is_compared], answers


def checks_under_load(
    session: Session,
    settings: RecoverySettings,
    prompts: Sequence[Sequence[int]],
    references: References,
) -> Checks:
    """Open the engine, ask greedy and drawn requests beside each other, and yield the columns of
    each check.

    Where the model's exact probabilities are known, from its weights or as the regular arm
    reports them, they score all answers; elsewhere the same requests are asked again, one at a
    time, and both answers are compared.

    Args:
        prompts: token ids of each.

    Raises:
        RunError: the engine does not answer at all, or takes no sampling setting.
    """
    assert settings.load is not None
    # A first prompt may have a token more (`Workload`), a second one goes on after an answer.
    longest = max(map(len, prompts)) + 1
    longest_second = longest + settings.decoding.max_new_tokens + FOLLOW_UP
    session.place(settings.load, longest_second, rows_setting="load")
    engine = session.open(settings.load, longest_second, fault=settings.fault)
    arm = engine.arms[-1]
    servers = engine.servers
    is_vllm = servers is not None and any("vLLM" in name for name in servers.names)
    taken, refused = taken_samplings(arm, settings, prompts[0], is_vllm)
    reference: TextReference | None = None
    if settings.reference != "regular":
        reference = references.for_tokens()
    if reference is None and settings.reference != "weights":
        reference = regular_reference(session, settings, prompts[0])
    if isinstance(reference, RegularReference):
        unknown = [sampling for sampling in taken if not reference.knows(sampling)]
        if unknown:
            names = ", ".join(sampling.name for sampling in unknown)
            say(f"not tested, because top_logprobs={settings.top_logprobs} is not enough: {names}")
        taken = [sampling for sampling in taken if sampling not in unknown]
    test = LoadTest(
        settings, settings.load, prompts, taken, ", ".join(refused) or None, session.end_tokens()
    )
    if reference is not None:
        yield from _against_exact(test, arm, reference)
        return
    beyond_model = settings.engine.beyond_model
    if beyond_model is not None:
        say(f"{beyond_model}: answers are compared with those to the same requests alone")
    else:
        say("without the exact distribution: answers are compared with each other")
    yield from _against_alone(test, arm, engine.arms[0], references)


def _against_exact(test: LoadTest, arm: Arm, reference: TextReference) -> Checks:
    """Test an arm's answers by exact probabilities; before that the arm that is the reference.

    Raises:
        RunError: log-probabilities that came with tokens are wrong.
    """
    settings = test.settings
    num_samplings = len(test.samplings)
    # First tokens and later ones of each setting, pairs, and all settings together.
    token_test = TokenTest(settings.false_alarm_rate / (2 * num_samplings + 2), settings.shift)
    mean_length = (1 + most_drawn(settings.decoding.max_new_tokens)) / 2

    def power(num_tokens: int) -> float:
        """Of the test of all settings together, each text of which has a first token."""
        num_first = round(num_tokens / num_samplings / mean_length)
        num_later = round(num_tokens / num_samplings) - num_first
        parts = [token_test.expected(num_first), token_test.expected(num_later)]
        return together(parts * num_samplings).power

    def needed(least: int) -> int | None:
        number = draws_needed(power, least)
        # The lengths of texts are random, too.
        return None if number is None else round(1.05 * number)

    num_tokens = 0
    tested = "greedy texts"
    if test.samplings:
        # Where no number is enough, more draws would change nothing.
        fewest = needed(_FEWEST_TOKENS) or _FEWEST_TOKENS
        num_tokens = fewest if settings.num_draws == "auto" else settings.num_draws
        tested += f" and {num_tokens:,} drawn tokens over {num_samplings} sampling settings"
    num_drawn_each = math.ceil(num_tokens / mean_length / 2)

    def scored(arm: Arm) -> tuple[Scores, list[RequestRecord]]:
        say(f"testing the {arm.name} arm with {tested}, {test.num_in_flight} in flight")
        compared, answers = test.ask_in_rounds(arm, num_drawn_each)
        num_together = min(test.num_in_flight, 8)
        scores = Scores(reference, test.end_tokens, num_together, [settings.seed, 1])
        scores.add([pair for pair in compared if not pair[0].is_greedy])
        if isinstance(reference, RegularReference) and arm is reference.arm:
            texts = [(planned.prompt, answer.token_ids) for planned, answer in compared]
            reference.learn_rounding([text for text in texts if text[1]], scores.returned)
        scores.add([pair for pair in compared if pair[0].is_greedy])
        return scores, answers

    returned: list[dict[str, Any]] = []
    tolerance = TOLERANCE
    if isinstance(reference, RegularReference):
        scores, _ = scored(reference.arm)
        checks, overall = _checks(test, token_test, scores)
        is_lossy = "lossy" in {check["verdict"] for check in checks}
        p_values = [check["p_value"] for check in checks if check.get("p_value") is not None]
        yield {
            **checks[0],
            **overall,
            "check": "reference",
            "arm": reference.arm.name,
            "verdict": "undecided" if is_lossy else "lossless",
            "p_value": min(p_values, default=None),
            "refused": test.refused,
        }
        if is_lossy:
            return
        returned += _returned_check(test, reference.arm, scores, tolerance)
        tolerance = max(_LEAST_TOLERANCE, reference.rounding)
    scores, answers = scored(arm)
    checks, overall = _checks(test, token_test, scores)
    yield from checks
    if overall:
        is_undecided = overall["verdict"] == "undecided"
        yield {
            **overall,
            "refused": test.refused,
            "num_draws_needed": needed(overall["num_draws"]) if is_undecided else None,
            "acceptance": Acceptance.of(pair for answer in answers for pair in answer.outcomes),
            # Some servers tell it without iterations.
            "acceptance_rate": acceptance_columns(answers)["acceptance_rate"],
        }
    returned += _returned_check(test, arm, scores, tolerance)
    yield from returned
    wrong = [f"{one['arm']}: {one['finding']}" for one in returned if one["verdict"] == "wrong"]
    if wrong:
        about = f"log-probabilities that came with tokens are wrong: {'; '.join(wrong)}"
        if "lossy" not in {check["verdict"] for check in checks}:
            raise RunError(about)
        say(about)


def _checks(
    test: LoadTest, token_test: TokenTest, scores: Scores
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The columns of the checks of scored answers, the greedy one first, and those of all drawn tokens together."""
    checks = [scores.greedy.columns()]
    if not test.samplings:
        return checks, {}
    parts = []
    for sampling in test.samplings:
        texts = [text for text in scores.drawn if text.sampling == sampling]
        for name, places in (("first", slice(0, 1)), ("later", slice(1, None))):
            check = token_test.check(texts, places, scores.two_routes)
            parts.append(check)
            checks.append(check.columns() | {"sampling": f"{sampling.name}, {name} tokens"})
    checks.append(token_test.check_pairs(scores.drawn).columns() | {"sampling": PAIRS})
    return checks, together(parts).columns()


def _returned_check(
    test: LoadTest, arm: Arm, scores: Scores, tolerance: float
) -> list[dict[str, Any]]:
    """The check of log-probabilities that an arm returned, if it returned any."""
    if not scores.returned.returned:
        return []
    columns = scores.returned.columns(arm.traits.logprobs, tolerance)
    if not columns:
        say(f"{arm.name}: log-probabilities were asked for, and none came")
        return []
    return [columns | {"arm": arm.name, "refused": test.refused}]


def _against_alone(test: LoadTest, arm: Arm, other: Arm, references: References) -> Checks:
    """Ask an arm under load, and another one, or the same, the same requests one at a time; compare both answers."""
    settings = test.settings
    workload = test.workload()
    # `shuffled` adds requests that are left midway.
    greedy = [
        planned for planned in workload.first_turns(0) if planned.is_greedy and planned.is_compared
    ]
    num_each = _NUM_ALONE
    if settings.num_draws != "auto":
        num_each = math.ceil(settings.num_draws / max(1, len(test.samplings)))
    drawn: dict[str, list[PlannedRequest]] = {}
    for sampling, prompt in zip(test.samplings, itertools.cycle(test.prompts), strict=False):
        drawn[sampling.name] = workload.repeated(prompt, sampling, num_each, _NUM_COMPARED)
    loaded = workload.shuffled([*greedy, *itertools.chain(*drawn.values())])
    about = f"{len(loaded):,} requests, {test.num_in_flight} in flight"
    say(f"testing the {arm.name} arm: {about}, and up to as many alone ({other.name})")
    answers = test.ask(arm, loaded, test.num_in_flight)
    under_load = dict(zip((planned.index for planned in loaded), answers, strict=True))

    texts = GreedyTexts(test.end_tokens)
    alone: Sequence[RequestRecord | None] = [None] * len(greedy)
    if references.for_texts() is None:
        alone = test.ask(other, greedy, 1, "alone")
    for planned, expected in zip(greedy, alone, strict=True):
        answer = under_load[planned.index]
        texts.compare(references, planned.prompt, planned.num_tokens, answer, expected)
    yield texts.columns()
    if not test.samplings:
        return

    token_test = TokenTest(settings.false_alarm_rate / (len(test.samplings) + 1), settings.shift)
    parts = []
    for sampling in test.samplings:
        asked = drawn[sampling.name]
        # With new indices, and so with other random numbers.
        again = workload.repeated(asked[0].prompt, sampling, num_each, _NUM_COMPARED)
        answers_alone = test.ask(other, again, 1, f"alone, {sampling.name}")
        loaded_answers = [under_load[planned.index] for planned in asked]
        check = token_test.compare(
            [answer.token_ids for answer in answers_alone],
            [answer.token_ids for answer in loaded_answers],
            _NUM_COMPARED,
        )
        outcomes = itertools.chain(*(answer.outcomes for answer in loaded_answers))
        check = dataclasses.replace(check, acceptance=Acceptance.of(outcomes))
        parts.append(check)
        yield check.columns() | {"sampling": f"{sampling.name}, beside those alone"}
    yield together(parts).columns() | {"refused": test.refused}
