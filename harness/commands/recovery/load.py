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
from harness.commands.recovery.returned_logprobs import TOLERANCE
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.served_reference import ServedReference, regular_as_reference
from harness.commands.recovery.workload import (
    FOLLOW_UP,
    PlannedRequest,
    Workload,
    most_drawn,
    taken_samplings,
)
from harness.config.errors import RunError
from harness.engines.protocol import Arm, TextReference
from harness.engines.requests import RequestRecord, acceptance_columns
from harness.engines.timing import quick_garbage_collections
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
    """An arm, and what it is tested with.

    Attributes:
        samplings: sampling settings that are tested.
        refused: names of those that the engine refused; None without any.
        end_tokens: those at which the target ends a text.
    """

    settings: RecoverySettings
    arm: Arm
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]
    refused: str | None
    references: References
    end_tokens: frozenset[int]

    def workload(self) -> Workload:
        """The requests, from the first one on."""
        settings = self.settings
        return Workload(self.prompts, self.samplings, settings.decoding, settings.seed)

    @property
    def num_in_flight(self) -> int:
        assert self.settings.load is not None
        return self.settings.load

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


def checks_under_load(
    session: Session, settings: RecoverySettings, prompts: Sequence[Sequence[int]]
) -> Checks:
    """Open the engine, ask greedy and drawn requests beside each other, and yield the columns of
    each check.

    Where the model's exact probabilities are known, from its weights or as the regular server
    reports them, they score all answers; elsewhere the same requests are asked again, one at a
    time, and both answers are compared.

    Args:
        prompts: token ids of each.

    Raises:
        RunError: the engine does not answer at all, or takes no sampling setting.
    """
    assert settings.load is not None
    references = References(session)
    # A first prompt may have a token more (`Workload`), a second one goes on after an answer.
    longest = max(map(len, prompts)) + 1
    longest_second = longest + settings.decoding.max_new_tokens + FOLLOW_UP
    session.place(settings.load, longest_second, rows_setting="load")
    engine = session.open(settings.load, longest_second, fault=settings.fault)
    arm = engine.arms[-1]
    is_vllm = settings.engine.name == "vllm" or "vLLM" in (engine.server or "")
    taken, refused = taken_samplings(arm, settings, prompts[0], is_vllm)
    reference: TextReference | None = None
    if settings.reference != "server":
        reference = references.for_tokens()
    if reference is None and settings.reference != "weights":
        reference = regular_as_reference(session, settings, prompts[0])
    if isinstance(reference, ServedReference):
        unknown = [sampling for sampling in taken if not reference.knows(sampling)]
        if unknown:
            names = ", ".join(sampling.name for sampling in unknown)
            say(f"not tested, because top_logprobs={settings.top_logprobs} is not enough: {names}")
        taken = [sampling for sampling in taken if sampling not in unknown]
    end_tokens = session.end_tokens()
    test = LoadTest(
        settings, arm, prompts, taken, ", ".join(refused) or None, references, end_tokens
    )
    if reference is not None:
        yield from _against_exact(test, reference)
        return
    if getattr(settings.engine, "chat", False):
        say("engine.chat=true: answers are compared with those of the same server alone")
    else:
        say("without the exact distribution: answers are compared with each other")
    yield from _against_alone(test)


def _against_exact(test: LoadTest, reference: TextReference) -> Checks:
    """Test an arm's answers by exact probabilities; before that a server that is the reference.

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

    returned = []
    tolerance = TOLERANCE
    arms = [test.arm]
    if isinstance(reference, ServedReference):
        arms = [reference.arm, test.arm]
    for arm in arms:
        say(f"testing the {arm.name} arm with {tested}, {test.num_in_flight} in flight")
        scores, answers = _scored(test, arm, reference, num_drawn_each)
        greedy = scores.greedy.columns()
        checks = []
        overall: dict[str, Any] = {}
        if test.samplings:
            parts = []
            for sampling in test.samplings:
                texts = [text for text in scores.drawn if text.sampling == sampling]
                for name, places in (("first", slice(0, 1)), ("later", slice(1, None))):
                    check = token_test.check(texts, places, scores.two_routes)
                    parts.append(check)
                    checks.append(check.columns() | {"sampling": f"{sampling.name}, {name} tokens"})
            of_pairs = token_test.check_pairs(scores.drawn)
            checks.append(of_pairs.columns() | {"sampling": PAIRS})
            overall = together(parts).columns()
        is_lossy = "lossy" in {greedy["verdict"], *(check["verdict"] for check in checks)}
        if scores.returned.returned:
            columns = scores.returned.columns(arm.dialect.logprobs, tolerance)
            if columns:
                returned.append(columns | {"arm": arm.name, "refused": test.refused})
            else:
                say(f"{arm.name}: log-probabilities were asked for, and none came")
        if arm is test.arm:
            yield greedy
            yield from checks
            if overall:
                yield {
                    **overall,
                    "refused": test.refused,
                    "num_draws_needed": needed(overall["num_draws"])
                    if overall["verdict"] == "undecided"
                    else None,
                    "acceptance": Acceptance.of(
                        pair for answer in answers for pair in answer.outcomes
                    ),
                    # Some servers tell it without iterations.
                    "acceptance_rate": acceptance_columns(answers)["acceptance_rate"],
                }
            continue
        # The reference itself.
        assert isinstance(reference, ServedReference)
        p_values = [check["p_value"] for check in checks if check["p_value"] is not None]
        yield {
            **greedy,
            **overall,
            "check": "reference",
            "arm": arm.name,
            "verdict": "undecided" if is_lossy else "lossless",
            "p_value": min(p_values, default=None),
            "refused": test.refused,
        }
        tolerance = max(_LEAST_TOLERANCE, reference.rounding)
        if is_lossy:
            return
    yield from returned
    wrong = [f"{one['arm']}: {one['finding']}" for one in returned if one["verdict"] == "wrong"]
    if wrong:
        about = f"log-probabilities that came with tokens are wrong: {'; '.join(wrong)}"
        if not is_lossy:
            raise RunError(about)
        say(about)


def _scored(
    test: LoadTest, arm: Arm, reference: TextReference, num_drawn_each: int
) -> tuple[Scores, list[RequestRecord]]:
    """Ask two rounds of requests, the second after answers of the first, and score the answers."""
    workload = test.workload()
    first = workload.first_turns(num_drawn_each)
    answers = test.ask(arm, first, test.num_in_flight)
    first_texts = [answer.token_ids for answer in answers]
    second = workload.second_turns(first, first_texts, num_drawn_each)
    answers += test.ask(arm, second, test.num_in_flight, "under load, second turns")
    scores = Scores(reference, test.end_tokens, min(test.num_in_flight, 8), [test.settings.seed, 1])
    asked = zip([*first, *second], answers, strict=True)
    # Others were left midway.
    compared = [(planned, answer) for planned, answer in asked if planned.is_compared]
    scores.add([pair for pair in compared if not pair[0].is_greedy])
    if isinstance(reference, ServedReference) and arm is reference.arm:
        texts = [(planned.prompt, answer.token_ids) for planned, answer in compared]
        reference.learn_rounding([text for text in texts if text[1]], scores.returned)
    scores.add([pair for pair in compared if pair[0].is_greedy])
    return scores, answers


def _against_alone(test: LoadTest) -> Checks:
    """Ask requests under load and then one at a time, and compare both answers."""
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
    say(f"testing the {test.arm.name} arm: {about}, and up to as many alone")
    answers = test.ask(test.arm, loaded, test.num_in_flight)
    under_load = dict(zip((planned.index for planned in loaded), answers, strict=True))

    texts = GreedyTexts(test.end_tokens)
    alone: Sequence[RequestRecord | None] = [None] * len(greedy)
    if test.references.for_texts() is None:
        alone = test.ask(test.arm, greedy, 1, "alone")
    for planned, expected in zip(greedy, alone, strict=True):
        answer = under_load[planned.index]
        texts.compare(test.references, planned.prompt, planned.num_tokens, answer, expected)
    yield texts.columns()
    if not test.samplings:
        return

    token_test = TokenTest(settings.false_alarm_rate / (len(test.samplings) + 1), settings.shift)
    parts = []
    for sampling in test.samplings:
        asked = drawn[sampling.name]
        # With new indices, and so with other random numbers.
        again = workload.repeated(asked[0].prompt, sampling, num_each, _NUM_COMPARED)
        answers_alone = test.ask(test.arm, again, 1, f"alone, {sampling.name}")
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
