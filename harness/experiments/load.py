"""`recovery load=8`: tests an engine as it is used, with requests that come, go and differ.

Two questions. Is each greedy text what the engine gives for the request alone? And are drawn tokens
distributed as the target has it, for every sampling setting that the engine takes?
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from harness.config.errors import RunError, SettingError
from harness.engines.batches import in_batches
from harness.engines.divergence import Divergence, check_known, first_divergence
from harness.engines.protocol import Arm, Reference
from harness.engines.requests import RequestRecord, acceptance_columns
from harness.engines.timing import Generation, quick_collections
from harness.experiments.lossless import (
    REQUIRED_POWER,
    SampledCheck,
    SampledTest,
    greedy_columns,
    require_token_ids,
    sampled_columns,
    together,
)
from harness.experiments.outcomes import Floats
from harness.experiments.progress import progress, say
from harness.experiments.quantiles import QuantileTest, cell_masses, num_cells_for, quantiles
from harness.experiments.references import References
from harness.experiments.samplings import Sampling, samplings
from harness.experiments.session import Session
from harness.experiments.workload import FOLLOW_UP, PlannedRequest, Workload, most_drawn
from harness.menu.commands.recovery import RecoverySettings
from harness.menu.records import engine_of
from harness.results.acceptance import Acceptance

PAIRS = "neighbouring tokens"
# Statuses of a server that does not have a parameter.
_REFUSALS = (400, 404, 422, 501)
# Tokens whose logits `logit_bias` raises: the beginning of a prompt.
_NUM_BIASED = 4
# Texts of each sampling setting from which rounding is estimated.
_NUM_ROUNDED = 8
# Without exact probabilities: tokens compared of each text, and texts of each sampling setting.
_NUM_COMPARED = 3
_NUM_ALONE = 500
# Drawn tokens of `num_draws=auto` at least, and at most.
_FEWEST_TOKENS = 2000
_MOST_TOKENS = 4_000_000
# Texts whose logits are computed together: of a large vocabulary, those of one text are many.
_SCORED_TOGETHER = 8


class _Text(NamedTuple):
    """A request, and the tokens of its answer."""

    planned: PlannedRequest
    token_ids: Sequence[int]


class _Rounded(NamedTuple):
    """The exact probabilities [n, V] along a text, by two routes that differ by rounding alone."""

    probabilities: Floats
    others: Floats


class _Group(NamedTuple):
    """Drawn tokens of a sampling setting that are tested together.

    Attributes:
        quantiles: of the tokens in the exact distribution.
        rounded_masses: of the cells of the test, as another rounding has them; None if not known.
    """

    name: str
    quantiles: Floats
    rounded_masses: Floats | None


class LoadTest:
    """The checks of a run under load. Opens the engine, and tries which sampling settings it takes.

    Attributes:
        checks: the columns of each check, as they are found.

    Raises:
        RunError: the engine does not answer at all.
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
        longest = max(map(len, prompts)) + 1
        second = longest + settings.decoding.max_new_tokens + FOLLOW_UP
        session.place(self._num_in_flight, second)
        engine = session.open(self._num_in_flight, second, fault=settings.fault)
        self._arm = engine.arms[-1]
        self._taken: list[Sampling] = []
        self._refused: list[str] = []
        if settings.decoding.temperature > 0:
            self._try_samplings()
        self._workload = Workload(prompts, self._taken, settings.decoding, settings.seed)

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
            # Our loop has no others, which nobody expects of it.
            self._taken += [sampling for sampling in tried if not sampling.parameters]
            return
        for sampling in tried:
            if is_taken(
                self._arm, PlannedRequest(tuple(prompt), sampling, 1, index=0), settings.seed
            ):
                self._taken.append(sampling)
            else:
                self._refused.append(sampling.name)
        if self._refused:
            say(f"refused by the engine, and not tested: {', '.join(self._refused)}")

    def _answers(
        self, planned: Sequence[PlannedRequest], num_in_flight: int, doing: str = "under load"
    ) -> list[RequestRecord]:
        """The answers in the order of the requests. Raises RunError where one failed."""
        requests = [each.request(self._settings.seed) for each in planned]
        answers: dict[int, RequestRecord] = {}
        with progress(doing, len(requests)) as advance, quick_collections():
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
        # Half of them in each round.
        num_tokens = self._num_drawn_tokens()
        num_drawn = math.ceil(num_tokens / self._mean_length / 2)
        first = self._workload.first_turns(num_drawn)
        self._say_how_much(len(first), num_tokens)
        answers = self._answers(first, self._num_in_flight)
        first_texts = [answer.token_ids for answer in answers]
        second = self._workload.second_turns(first, first_texts, num_drawn)
        answers += self._answers(second, self._num_in_flight, "under load, second turns")
        compared: list[_Text] = []
        read: list[RequestRecord] = []
        for planned, answer in zip([*first, *second], answers, strict=True):
            if planned.is_compared and answer.token_ids:
                compared.append(_Text(planned, answer.token_ids))
                read.append(answer)
        require_token_ids(read)
        batch_size = min(self._num_in_flight, _SCORED_TOGETHER)
        scores = _Scores(reference, batch_size, self._settings.seed)
        with progress("comparing", len(compared)) as advance:
            for _ in scores.add(compared):
                advance(None)
        self.checks.append(greedy_columns(scores.divergences, scores.num_greedy))
        if self._taken:
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
            settings = f"{len(self._taken)} sampling settings"
            tested = f"greedy texts and {num_tokens:,} drawn tokens over {settings}"
        say(f"testing the {self._arm.name} arm with {tested}: {about}")

    @property
    def _mean_length(self) -> float:
        """The mean length of drawn texts."""
        return (1 + most_drawn(self._settings.decoding.max_new_tokens)) / 2

    def _num_drawn_tokens(self) -> int:
        num_draws = self._settings.num_draws
        if not self._taken:
            return 0
        if num_draws != "auto":
            return num_draws
        # Where no number is enough, more draws would change nothing.
        return self._tokens_needed(_FEWEST_TOKENS) or _FEWEST_TOKENS

    def _tokens_needed(self, least: int) -> int | None:
        return tokens_needed(self._test(), len(self._taken), self._mean_length, least)

    def _test(self) -> QuantileTest:
        # First tokens and later ones of each setting, pairs, and all together.
        num_tests = 2 * len(self._taken) + 2
        level = self._settings.false_alarm_rate / num_tests
        return QuantileTest(level, self._settings.shift)

    def _add_quantiles(self, scores: _Scores, acceptance: Acceptance) -> None:
        test = self._test()
        parts = []
        for sampling in self._taken:
            for group in scores.groups(sampling):
                check = test.check(group.quantiles, group.rounded_masses)
                parts.append(check)
                self.checks.append(
                    sampled_columns(check) | {"sampling": f"{sampling.name}, {group.name}"}
                )
        pairs = test.check_pairs(scores.all_quantiles)
        self.checks.append(sampled_columns(pairs) | {"sampling": PAIRS})
        overall = together(parts)
        needed = None
        if overall.verdict == "undecided":
            needed = self._tokens_needed(overall.num_draws)
        self._add_overall(overall, acceptance, needed)

    def _add_overall(
        self, check: SampledCheck, acceptance: Acceptance, num_draws_needed: int | None = None
    ) -> None:
        self.checks.append(
            sampled_columns(check)
            | {
                "acceptance": acceptance,
                "refused": ", ".join(self._refused) or None,
                "num_draws_needed": num_draws_needed,
            }
        )

    # Without them: the same requests alone.

    def _compare_with_alone(self) -> None:
        taken = self._taken
        workload = self._workload
        greedy = [
            planned
            for planned in workload.first_turns(0)
            if planned.is_greedy and planned.is_compared
        ]
        num_draws = self._settings.num_draws
        num_each = _NUM_ALONE if num_draws == "auto" else -(-num_draws // max(1, len(taken)))
        drawn: list[PlannedRequest] = []
        for place, sampling in enumerate(taken):
            prompt = self._prompts[place % len(self._prompts)]
            drawn += workload.repeated(prompt, sampling, num_each, _NUM_COMPARED)
        loaded = workload.shuffled([*greedy, *drawn])
        about = f"{len(loaded):,} requests, {self._num_in_flight} in flight"
        say(f"testing the {self._arm.name} arm: {about}, and up to as many alone")
        answers = self._answers(loaded, self._num_in_flight)
        under_load = dict(zip((planned.index for planned in loaded), answers, strict=True))
        self._add_greedy_texts(greedy, [under_load[planned.index] for planned in greedy])
        if not taken:
            return
        level = self._settings.false_alarm_rate / (len(taken) + 1)
        test = SampledTest(_NUM_COMPARED, level, self._settings.shift)
        parts = []
        for sampling in taken:
            of_sampling = [planned for planned in drawn if planned.sampling is sampling]
            again = workload.repeated(of_sampling[0].prompt, sampling, num_each, _NUM_COMPARED)
            alone = self._answers(again, 1, f"alone, {sampling.name}")
            loaded_answers = [under_load[planned.index] for planned in of_sampling]
            samples = [
                Generation("alone", requests=alone),
                Generation("load", requests=loaded_answers),
            ]
            check = test.compare(samples[:1], samples[1:])
            parts.append(check)
            named = {"sampling": f"{sampling.name}, beside those alone"}
            self.checks.append(sampled_columns(check) | named)
        overall = together(parts)
        self._add_overall(overall, overall.acceptance)

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


class _Scores:
    """The verdict of exact probabilities over texts.

    Attributes:
        divergences: for each greedy text the first token that is not the likeliest, None without
            one.
        num_greedy: number of tokens of greedy texts.
        all_quantiles: for each drawn text the quantiles of its tokens.
    """

    def __init__(self, reference: Reference, batch_size: int, seed: int) -> None:
        self.divergences: list[Divergence | None] = []
        self.num_greedy = 0
        self.all_quantiles: list[Floats] = []
        self._reference = reference
        self._batch_size = batch_size
        self._generator = np.random.default_rng([seed, 1])
        self._quantiles: dict[str, list[Floats]] = defaultdict(list)
        self._rounded: dict[str, list[_Rounded]] = defaultdict(list)

    def add(self, texts: Sequence[_Text]) -> Iterator[None]:
        """Score texts; yields after each."""
        # Texts of about the same length need little filling.
        by_length = sorted(texts, key=lambda text: len(text.token_ids))
        for batch in in_batches(by_length, self._batch_size):
            for text in batch:
                check_known(
                    [*text.planned.prompt, *text.token_ids], self._reference.vocabulary_size
                )
            prompts = [text.planned.prompt for text in batch]
            logits = self._reference.logits_along(prompts, [text.token_ids for text in batch])
            for row, (planned, token_ids) in enumerate(batch):
                self._add(planned, token_ids, logits[row, : len(token_ids)])
                yield

    def groups(self, sampling: Sampling) -> Iterator[_Group]:
        """Yield the first tokens of a setting's texts, and the later ones."""
        yield self._group("first tokens", sampling, slice(0, 1))
        yield self._group("later tokens", sampling, slice(1, None))

    def _group(self, name: str, sampling: Sampling, places: slice) -> _Group:
        by_text = self._quantiles[sampling.name]
        values = np.concatenate([values[places] for values in by_text]) if by_text else np.zeros(0)
        rounded_masses = None
        rounded = self._rounded[sampling.name]
        if rounded:
            exact = np.concatenate([each.probabilities[places] for each in rounded])
            others = np.concatenate([each.others[places] for each in rounded])
            if len(exact):
                rounded_masses = cell_masses(exact, others, num_cells_for(len(values)))
        return _Group(name, values, rounded_masses)

    def _add(self, planned: PlannedRequest, text: Sequence[int], logits: Tensor) -> None:
        if planned.is_greedy:
            likeliest = logits.argmax(-1).tolist()
            self.num_greedy += len(text)
            # After the first token that differs, the texts are not comparable.
            self.divergences.append(
                first_divergence(self._reference, planned.prompt, likeliest, text)
            )
            return
        sampling = planned.sampling
        exact = sampling.probabilities_along(logits, planned.prompt, text)
        of_text = quantiles(exact, text, self._generator)
        self._quantiles[sampling.name].append(of_text)
        self.all_quantiles.append(of_text)
        if len(self._rounded[sampling.name]) < _NUM_ROUNDED and len(planned.prompt) > 1:
            # The same logits by another route: in a batch of one, with a prompt one token shorter.
            *prompt, last = planned.prompt
            other_logits = self._reference.logits_along([prompt], [[last, *text]])[0, 1:]
            others = sampling.probabilities_along(other_logits, planned.prompt, text)
            self._rounded[sampling.name].append(_Rounded(exact, others))


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
