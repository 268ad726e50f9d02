"""The requests of `recovery`. A mistake in verification, a batch or a cache should spoil some.

They have mixed lengths, prompts that begin alike, second turns and different sampling settings, and
some are left midway. Many go on at one place, where a wrong recovered token would show most
(`choose_place`), so that their next tokens can be tested as one distribution. They come in two rounds
(`first_turns`, `second_turns`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.sampling import Sampling, samplings
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Arm, Request, in_batches
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord
from harness.engines.timing import quick_garbage_collections
from harness.measuring.acceptance import drafts_of
from harness.measuring.progress import progress, say
from harness.results.statistics.drawn_tokens import TokenResult, TokenTest

# Of a check's row, by name.
Columns = dict[str, Any]

# Statuses of a server that does not have a parameter.
_REFUSALS = (400, 404, 422, 501)
# The most tokens of a drawn text. With longer ones fewer prompts could be asked in the same time, with shorter ones
# more of the tested tokens would be first tokens.
_MOST_DRAWN = 32
# Tokens of another prompt that follow an answer as the next turn.
FOLLOW_UP = 8
# For each request that is left midway, this many are read to their end.
_READ_FOR_ONE_LEFT = 7


def most_drawn(max_new_tokens: int) -> int:
    """The most tokens of a drawn text; every length up to it is as likely."""
    return min(max_new_tokens, _MOST_DRAWN)


def tokens_at_place(decoding: DecodingSettings) -> int:
    """How many tokens each text at the one place has: the target's own first one, a whole proposal, and the bonus
    token behind it.
    """
    return min(decoding.most_draft_tokens + 2, decoding.max_new_tokens)


@dataclass(frozen=True)
class PlannedRequest:
    """A request of the load.

    Attributes:
        num_tokens: the length of its text.
        index: with the seed it determines the random numbers, where the engine takes them.
        leave_after: tokens after which nobody waits for the rest, so that the text is not compared;
            None to wait for all.
        is_at_place: whether it is one of the many that continue one place.
        ends: the first of these tokens ends its text; none where it has its length.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    num_tokens: int
    index: int
    leave_after: int | None = None
    is_at_place: bool = False
    ends: frozenset[int] = frozenset()

    @property
    def is_compared(self) -> bool:
        return self.leave_after is None

    @property
    def is_greedy(self) -> bool:
        return self.sampling.decoding.temperature == 0

    def request(self, seed: int, with_logprobs: bool = False) -> Request:
        """The request as an arm takes it; drawn tokens may come with their log-probabilities."""
        decoding = dataclasses.replace(
            self.sampling.decoding, max_new_tokens=self.num_tokens, ignore_eos=not self.ends
        )
        return Request(
            self.prompt,
            decoding,
            seed,
            self.index,
            self.ends,
            with_logprobs=with_logprobs and not self.is_greedy,
            leave_after=self.leave_after,
            # It is judged like any other text.
            may_be_empty=True,
            read_alone=True,
        )


class Answer(NamedTuple):
    """An arm's answer to a request."""

    request: PlannedRequest
    record: RequestRecord

    @property
    def passes_its_end(self) -> bool:
        """Whether a token before the last one should have ended the text."""
        return not self.request.ends.isdisjoint(self.record.token_ids[:-1])


def acceptance_of(records: Sequence[RequestRecord]) -> Columns:
    """Columns about acceptance: without rejections much of the algorithm never ran."""
    columns = drafts_of(records).columns()
    return {name: columns[name] for name in columns.keys() & RecoveryRow.columns().keys()}


def taken_samplings(
    arm: Arm, settings: RecoverySettings, prompt: Sequence[int]
) -> tuple[list[Sampling], list[str]]:
    """The sampling settings that the engine takes, and the names of those that it refuses, or that may end it.

    Raises:
        RunError: it does not answer at all, or takes none.
    """
    if settings.decoding.temperature == 0:
        return [], []
    tried = samplings(settings.decoding, settings.samplings)
    if engine_of(settings).own_loop:
        return tried, []
    taken = []
    for sampling in tried:
        planned = PlannedRequest(tuple(prompt), sampling, num_tokens=1, index=0)
        if why := crash_risk(arm, settings, sampling):
            say(f"{sampling.name} is not asked for: {why}")
        elif why_refused(arm, planned, settings.seed) is None:
            taken.append(sampling)
    refused = [sampling.name for sampling in tried if sampling not in taken]
    if not taken:
        raise RunError(
            f"the engine refuses temperature={settings.decoding.temperature:g} and all other"
            " sampling settings; decoding=greedy tests greedy texts alone"
        )
    if refused:
        say(f"refused by the engine, or not asked for, and not tested: {', '.join(refused)}")
    return taken, refused


def crash_risk(arm: Arm, settings: RecoverySettings, sampling: Sampling) -> str | None:
    """Why an arm is not asked for a sampling setting that the user has not named: it is known to crash this server."""
    parameter = sampling.name.partition("=")[0]
    is_named = settings.samplings != type(settings).samplings and parameter in settings.samplings
    program = arm.traits.ended_by.get(parameter)
    if program is None or is_named:
        return None
    return f"it may end this server, as it ends {program}; 'samplings=[as_asked,{parameter}]' asks for it"


def why_refused(arm: Arm, planned: PlannedRequest, seed: int) -> str | None:
    """Why an arm refuses a request or its sampling setting; None where it takes it.

    Raises:
        RunError: it does not answer at all.
    """
    try:
        [record] = arm.answer([planned.request(seed)], 1).requests
    except SettingError as error:
        return str(error)
    except RunError as error:
        raise RunError(f"{planned.sampling.name}: {error}") from error
    if record.error is not None and record.error.code not in _REFUSALS:
        raise RunError(f"{planned.sampling.name}: {record.error}")
    return None if record.error is None else str(record.error)


class Workload:
    """Makes the requests of a run, always the same ones for a seed."""

    def __init__(self, asking: Asking) -> None:
        decoding = asking.settings.decoding
        self._prompts = [tuple(prompt) for prompt in asking.prompts]
        self._decoding = decoding
        self._samplings = asking.samplings
        self._asking = asking
        self._greedy = Sampling("greedy", dataclasses.replace(decoding, temperature=0.0))
        self._most = decoding.max_new_tokens
        self._generator = np.random.default_rng(asking.settings.seed)
        self._num_made = 0

    def first_turns(self, num_drawn: int) -> list[PlannedRequest]:
        """Requests with the run's prompts, and with others that begin like them or nearly so.

        One greedy request for each prompt, and `num_drawn` whose prompts are any of these.
        """
        texts: list[tuple[int, ...]] = []
        for number, prompt in enumerate(self._prompts):
            half = prompt[: (len(prompt) + 1) // 2]
            other = self._prompts[(number + 1) % len(self._prompts)]
            half_of_each = (*half, *other[len(other) // 2 :])
            # The first token stays: many tokenizers put it before every text.
            without_second = (prompt[0], *prompt[2:])
            texts += [prompt, half, half_of_each, without_second]
        return self._shuffled(self._mixed(texts, num_drawn, self._prompts))

    def second_turns(
        self,
        answers: Sequence[Answer],
        num_drawn: int,
        at_place: Sequence[PlannedRequest] = (),
        num_in_flight: int = 1,
    ) -> list[PlannedRequest]:
        """Requests that go on after greedy answers to the prompts of the run, and those at the one place.

        These come in groups among the others, so that several begin at once, and their prompt is read once for them.

        Args:
            answers: to the first turns.
            num_in_flight: the size of a group.
        """
        texts = []
        for answer in answers:
            request = answer.request
            is_of_run = request.prompt in self._prompts
            if request.is_greedy and request.is_compared and is_of_run:
                # Any prompt of the run serves as what the user says next.
                next_turn = self._prompts[request.index % len(self._prompts)]
                text = answer.record.token_ids
                texts.append((*request.prompt, *text, *next_turn[-FOLLOW_UP:]))
        answered = [answer.record.token_ids for answer in answers]
        others = self._shuffled(self._mixed(texts, num_drawn, answered))
        groups = [[request] for request in others] + in_batches(at_place, num_in_flight)
        order = self._generator.permutation(len(groups))
        return [request for number in order for request in groups[number]]

    def at_place(self, place: tuple[int, ...], num: int) -> list[PlannedRequest]:
        """Requests that continue one place with the first sampling setting, each with random numbers of its own."""
        length = tokens_at_place(self._decoding)
        requests = [self._plan(place, self._samplings[0], length) for _ in range(num)]
        return [dataclasses.replace(request, is_at_place=True) for request in requests]

    def _shuffled(self, planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        """The requests in a random order, with some among them that are left midway."""
        prompts = [request.prompt for request in planned]
        mixed = list(planned)
        ways = [self._greedy, *self._samplings]
        for _ in range(len(planned) // _READ_FOR_ONE_LEFT):
            sampling = ways[int(self._generator.integers(len(ways)))]
            whole = self._plan(self._any(prompts), sampling, self._most)
            leave_after = self._length(max(1, self._most // 2))
            mixed.append(dataclasses.replace(whole, leave_after=leave_after))
        return [mixed[number] for number in self._generator.permutation(len(mixed))]

    def _mixed(
        self,
        prompts: Sequence[tuple[int, ...]],
        num_drawn: int,
        known_texts: Sequence[Sequence[int]],
    ) -> list[PlannedRequest]:
        """A greedy request for each prompt, and drawn ones for any.

        Half of them end at end tokens. Few models write one so early, and so each of these ends at a token of the known
        texts, too.
        """
        requests = []
        for prompt in prompts:
            length = self._length(self._most)
            requests.append(self._plan(prompt, self._greedy, length))
        num_drawn = num_drawn if self._samplings else 0
        for number in range(num_drawn):
            sampling = self._samplings[number % len(self._samplings)]
            length = self._length(most_drawn(self._most))
            requests.append(self._plan(self._any(prompts), sampling, length))
        if self._asking.can_end:
            known = [token for text in known_texts for token in text]
            for number in np.flatnonzero(self._generator.integers(2, size=len(requests))).tolist():
                ends = self._asking.end_tokens | {known[self._generator.integers(len(known))]}
                requests[number] = dataclasses.replace(requests[number], ends=ends)
        return requests

    def _plan(self, prompt: tuple[int, ...], sampling: Sampling, num_tokens: int) -> PlannedRequest:
        self._num_made += 1
        return PlannedRequest(prompt, sampling, num_tokens, self._num_made)

    def _any(self, prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return prompts[int(self._generator.integers(len(prompts)))]

    def _length(self, most: int) -> int:
        return int(self._generator.integers(1, most + 1))


@dataclass(frozen=True)
class Asking:
    """The requests that the arms of a run are asked.

    Attributes:
        prompts: token ids of each, none empty.
        samplings: the sampling settings that are tested; the run's own one is the first.
        end_tokens: those at which the target ends a text.
        can_end: whether the engine ends texts at given tokens, so that half of the requests have some.
        with_logprobs: whether drawn tokens are asked for with their log-probabilities.
        keep: gets all answers of an arm, by its name.
    """

    settings: RecoverySettings
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]
    end_tokens: frozenset[int]
    can_end: bool = False
    with_logprobs: bool = False
    keep: Callable[[str, Sequence[Answer]], object] = lambda name, answers: None

    @property
    def token_test(self) -> TokenTest:
        return TokenTest(self.settings.false_alarm_rate, self.settings.shift)

    def ask(
        self, arm: Arm, planned: Sequence[PlannedRequest], num_in_flight: int, doing: str
    ) -> list[Answer]:
        """The answers in the order of the requests. Raises RunError where one failed."""
        requests = [request.request(self.settings.seed, self.with_logprobs) for request in planned]
        num_noted = 0
        with progress(doing, len(requests)) as advance, quick_garbage_collections():

            def note_ended(number: int) -> None:
                nonlocal num_noted
                while num_noted < number:
                    num_noted += 1
                    advance(None)

            records = arm.answer(requests, num_in_flight, note_ended=note_ended).requests
        failed = [record for record in records if record.error is not None]
        if failed:
            number = f"{len(failed)} of {len(requests)} requests"
            raise RunError(f"{number} failed {doing}: {failed[0].error}")
        answers = [Answer(*answered) for answered in zip(planned, records, strict=True)]
        self.keep(arm.name, answers)
        return answers

    def sampled_check(self, result: TokenResult, records: Sequence[RequestRecord]) -> Columns:
        """The check of all drawn tokens, with the acceptance of all answers."""
        names = ", ".join(sampling.name for sampling in self.samplings)
        return {**vars(result), "check": "sampled", "sampling": names, **acceptance_of(records)}
