"""`recovery load=8`: tests an engine as it is used, with requests that come, go and differ.

Two questions. Is each greedy text what the engine gives for the request alone? And are drawn tokens
distributed as the target has it, for every sampling setting that the engine takes?
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from harness.config.errors import RunError, SettingError
from harness.engines.divergence import Divergence, first_divergence
from harness.engines.protocol import Arm, Reference
from harness.engines.requests import RequestRecord, acceptance_columns
from harness.engines.timing import Generation, quick_garbage_collections
from harness.experiments.lossless import (
    REQUIRED_POWER,
    SampledCheck,
    SampledTest,
    greedy_columns,
    require_token_ids,
    together,
)
from harness.experiments.progress import progress, say
from harness.experiments.quantiles import QuantileTest
from harness.experiments.references import References
from harness.experiments.samplings import Sampling, samplings
from harness.experiments.scores import AnsweredRequest, Scores
from harness.experiments.session import Session
from harness.experiments.workload import FOLLOW_UP, PlannedRequest, Workload, most_drawn
from harness.menu.commands.recovery import RecoverySettings
from harness.menu.records import engine_of
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
# Drawn tokens of `num_draws=auto` at least, and at most.
_FEWEST_TOKENS = 2000
_MOST_TOKENS = 4_000_000


class LoadTest:
    """The checks of a run under load. Opens the engine, and tries which sampling settings it takes.

    `run` asks greedy and drawn requests beside each other. Where the model's exact probabilities
    are known, they score all answers (`Scores`); elsewhere the same requests are asked again, one
    at a time, and both answers are compared.

    Args:
        prompts: token ids of each.

    Attributes:
        checks: the columns of each check, as they are found.

    Raises:
        RunError: the engine does not answer at all, or takes no sampling setting.
    """

    def __init__(
        self, session: Session, settings: RecoverySettings, prompts: Sequence[Sequence[int]]
    ) -> None:
        assert settings.load is not None
        self.checks: list[dict[str, Any]] = []
        self._references = References(session)
        self._settings = settings
        self._prompts = prompts
        self._num_in_flight = settings.load
        # A first prompt may have a token more (`Workload`), a second one goes on after an answer.
        longest = max(map(len, prompts)) + 1
        longest_second = longest + settings.decoding.max_new_tokens + FOLLOW_UP
        session.place(self._num_in_flight, longest_second, rows_setting="load")
        engine = session.open(self._num_in_flight, longest_second, fault=settings.fault)
        self._arm = engine.arms[-1]
        # Sampling settings that are tested, and names of those that the engine refused.
        self._samplings: list[Sampling] = []
        self._refused: list[str] = []
        if settings.decoding.temperature > 0:
            self._try_samplings()
        self._workload = Workload(prompts, self._samplings, settings.decoding, settings.seed)

    def run(self) -> None:
        """Ask under load, and check the answers."""
        reference = self._reference()
        if reference is None:
            self._compare_with_alone()
        else:
            self._compare_with_exact(reference)

    def _reference(self) -> Reference | None:
        """The exact probabilities; None, which a line says, where they or the prompts that the
        model reads are unknown.
        """
        if getattr(self._settings.engine, "chat", False):
            say("engine.chat=true: answers are compared with those of the same server alone")
            return None
        reference = self._references.for_tokens()
        if reference is None:
            say("without the exact distribution: answers are compared with each other")
        return reference

    def _try_samplings(self) -> None:
        """Find out which sampling settings the engine takes."""
        settings = self._settings
        prompt = self._prompts[0]
        biased = sorted(set(prompt))[:_NUM_BIASED]
        tried = samplings(settings.decoding, biased, self._arm.penalises_prompts)
        if engine_of(settings).own_loop:
            # Our loop has temperature, top-k and top-p alone; nobody expects penalties of it.
            self._samplings += [sampling for sampling in tried if not sampling.parameters]
            return
        for sampling in tried:
            planned = PlannedRequest(tuple(prompt), sampling, num_tokens=1, index=0)
            if is_taken(self._arm, planned, settings.seed):
                self._samplings.append(sampling)
            else:
                self._refused.append(sampling.name)
        if not self._samplings:
            raise RunError(
                f"the engine refuses temperature={settings.decoding.temperature:g} and all other"
                " sampling settings; decoding=greedy tests greedy texts alone"
            )
        if self._refused:
            say(f"refused by the engine, and not tested: {', '.join(self._refused)}")

    def _answers(
        self, planned: Sequence[PlannedRequest], num_in_flight: int, doing: str = "under load"
    ) -> list[RequestRecord]:
        """The answers in the order of the requests. Raises RunError where one failed."""
        requests = [each.request(self._settings.seed) for each in planned]
        # By their place among the requests.
        answers: dict[int, RequestRecord] = {}
        with progress(doing, len(requests)) as advance, quick_garbage_collections():
            for record in self._arm.under_load(requests, num_in_flight):
                answers[record.index] = record
                advance(None)
        failed = [record for record in answers.values() if record.error is not None]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(requests)} requests failed {doing}: {failed[0].error}"
            )
        return [answers[place] for place in range(len(requests))]

    # With exact probabilities.

    def _compare_with_exact(self, reference: Reference) -> None:
        """Ask two rounds of requests, the second after answers of the first, and score the answers."""
        num_tokens = self._num_drawn_tokens()
        num_drawn_each = math.ceil(num_tokens / self._mean_length / 2)
        first = self._workload.first_turns(num_drawn_each)
        self._say_how_much(len(first), num_tokens)
        answers = self._answers(first, self._num_in_flight)
        first_texts = [answer.token_ids for answer in answers]
        second = self._workload.second_turns(first, first_texts, num_drawn_each)
        answers += self._answers(second, self._num_in_flight, "under load, second turns")
        compared: list[AnsweredRequest] = []
        read: list[RequestRecord] = []
        for planned, answer in zip([*first, *second], answers, strict=True):
            # Others were left midway, or ended at once.
            if planned.is_compared and answer.token_ids:
                compared.append(AnsweredRequest(planned, answer.token_ids))
                read.append(answer)
        require_token_ids(read)
        scores = Scores(reference, self._num_in_flight, self._settings.seed)
        with progress("comparing", len(compared)) as advance:
            for _ in scores.add(compared):
                advance(None)
        self.checks.append(greedy_columns(scores.divergences, scores.num_greedy_tokens))
        if self._samplings:
            acceptance = Acceptance.of(pair for answer in answers for pair in answer.outcomes)
            self._add_quantiles(scores, acceptance)
            # Some servers tell it without iterations.
            self.checks[-1]["acceptance_rate"] = acceptance_columns(answers)["acceptance_rate"]

    def _say_how_much(self, num_requests: int, num_tokens: int) -> None:
        """Say what is tested, and how much work that is.

        Args:
            num_requests: of the first round.
            num_tokens: that are drawn in both.
        """
        about = f"two rounds of about {num_requests:,} requests, {self._num_in_flight} in flight"
        tested = "greedy texts"
        if num_tokens:
            settings = f"{len(self._samplings)} sampling settings"
            tested = f"greedy texts and {num_tokens:,} drawn tokens over {settings}"
        say(f"testing the {self._arm.name} arm with {tested}: {about}")

    @property
    def _mean_length(self) -> float:
        """The mean length of drawn texts."""
        return (1 + most_drawn(self._settings.decoding.max_new_tokens)) / 2

    def _num_drawn_tokens(self) -> int:
        num_draws = self._settings.num_draws
        if not self._samplings:
            return 0
        if num_draws != "auto":
            return num_draws
        # Where no number is enough, more draws would change nothing.
        return self._tokens_needed(_FEWEST_TOKENS) or _FEWEST_TOKENS

    def _tokens_needed(self, least: int) -> int | None:
        return tokens_needed(self._test(), len(self._samplings), self._mean_length, least)

    def _test(self) -> QuantileTest:
        # First tokens and later ones of each setting, pairs, and all settings together.
        num_tests = 2 * len(self._samplings) + 2
        level_share = self._settings.false_alarm_rate / num_tests
        return QuantileTest(level_share, self._settings.shift)

    def _add_quantiles(self, scores: Scores, acceptance: Acceptance) -> None:
        """Add the checks of drawn tokens: of each group, of pairs, and of all groups together."""
        test = self._test()
        parts = []
        for sampling in self._samplings:
            for group in scores.groups(sampling):
                check = test.check(group.quantiles, group.rounded_masses)
                parts.append(check)
                self._add_check(check, sampling=f"{sampling.name}, {group.name}")
        self._add_check(test.check_pairs(scores.quantiles_by_text), sampling=PAIRS)
        overall = together(parts)
        needed = None
        if overall.verdict == "undecided":
            needed = self._tokens_needed(overall.num_draws)
        self._add_overall(overall, acceptance=acceptance, num_draws_needed=needed)

    def _add_check(self, check: SampledCheck, **figures: Any) -> None:
        self.checks.append(check.columns() | figures)

    def _add_overall(self, check: SampledCheck, **figures: Any) -> None:
        self._add_check(check, refused=", ".join(self._refused) or None, **figures)

    # Without them: the same requests alone.

    def _compare_with_alone(self) -> None:
        """Ask requests under load and then one at a time, and compare both answers."""
        workload = self._workload
        # `shuffled` adds requests that are left midway.
        greedy = [
            planned
            for planned in workload.first_turns(0)
            if planned.is_greedy and planned.is_compared
        ]
        num_draws = self._settings.num_draws
        num_each = _NUM_ALONE
        if num_draws != "auto":
            num_each = math.ceil(num_draws / max(1, len(self._samplings)))
        drawn: dict[str, list[PlannedRequest]] = {}
        for sampling, prompt in zip(self._samplings, itertools.cycle(self._prompts), strict=False):
            drawn[sampling.name] = workload.repeated(prompt, sampling, num_each, _NUM_COMPARED)
        loaded = workload.shuffled([*greedy, *itertools.chain(*drawn.values())])
        about = f"{len(loaded):,} requests, {self._num_in_flight} in flight"
        say(f"testing the {self._arm.name} arm: {about}, and up to as many alone")
        answers = self._answers(loaded, self._num_in_flight)
        under_load = dict(zip((planned.index for planned in loaded), answers, strict=True))
        self._add_greedy_texts(greedy, [under_load[planned.index] for planned in greedy])
        if not self._samplings:
            return
        level_share = self._settings.false_alarm_rate / (len(self._samplings) + 1)
        test = SampledTest(_NUM_COMPARED, level_share, self._settings.shift)
        parts = []
        for sampling in self._samplings:
            asked = drawn[sampling.name]
            # With new indices, and so with other random numbers.
            again = workload.repeated(asked[0].prompt, sampling, num_each, _NUM_COMPARED)
            alone = Generation("alone", requests=self._answers(again, 1, f"alone, {sampling.name}"))
            loaded_answers = [under_load[planned.index] for planned in asked]
            check = test.compare([alone], [Generation("load", requests=loaded_answers)])
            parts.append(check)
            self._add_check(check, sampling=f"{sampling.name}, beside those alone")
        self._add_overall(together(parts))

    def _add_greedy_texts(
        self, greedy: Sequence[PlannedRequest], answers: Sequence[RequestRecord]
    ) -> None:
        """Compare greedy texts with the model's own; where it cannot be loaded, with those of
        requests alone.
        """
        references = self._references
        divergences: list[Divergence | None] = []
        if references.for_texts() is None:
            alone = self._answers(greedy, 1, "alone")
            for planned, answer, expected in zip(greedy, answers, alone, strict=True):
                divergences.append(
                    first_divergence(None, planned.prompt, expected.token_ids, answer.token_ids)
                )
        else:
            for planned, answer in zip(greedy, answers, strict=True):
                divergences.append(
                    references.text_divergence(planned.prompt, answer.text, planned.num_tokens)
                )
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        self.checks.append(greedy_columns(divergences, num_tokens))


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
