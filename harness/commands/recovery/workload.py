"""Makes the requests of `recovery`, which are chosen so that mistakes in verification, batches or caches spoil some of
the answers.

The requests have mixed lengths, prompts that begin alike, second turns and different sampling settings, and some of
them are left midway. Many requests continue *the one place*: a prefix after which wrong recovered tokens would show
most (`choose_place`). All tokens drawn there can be tested as one distribution. The requests come in two rounds
(`first_turns`, `second_turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling, samplings
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings
from harness.engines.counts import Counts
from harness.engines.protocol import Arm, Request, in_batches
from harness.engines.record import engine_of
from harness.engines.requests import RequestRecord
from harness.engines.timing import quick_garbage_collections
from harness.measuring.progress import progress, say
from harness.results.statistics.drawn_tokens import TokenTest

# Columns of a check's row, by name; `acceptance` is a `Drafts` (`Session.row`).
Columns = dict[str, Any]

# HTTP statuses with which servers refuse a parameter that they do not have.
_REFUSALS = (400, 404, 422, 501)
# The most tokens of a drawn text. Longer texts would leave time for fewer prompts. With shorter texts, more of the
# drawn tokens would be first tokens, which speculation does not decide and which are not tested.
_MOST_DRAWN = 32
# In the second round, the last tokens of one of the run's prompts, at most this many, follow an answer as the user's
# next turn.
FOLLOW_UP = 8
# For this many requests whose whole answers are read, one more request is left midway.
_READ_FOR_ONE_LEFT = 7


def most_drawn(max_new_tokens: int) -> int:
    """The most tokens of a drawn text; every length from 1 up to it is equally likely."""
    return min(max_new_tokens, _MOST_DRAWN)


def tokens_at_place(decoding: DecodingSettings) -> int:
    """The number of tokens of each text at the one place: the first token, a whole proposal, and the bonus token after
    the proposal; at most `max_new_tokens`.
    """
    return min(decoding.most_draft_tokens + 2, decoding.max_new_tokens)


@dataclass(frozen=True)
class PlannedRequest:
    """One of the requests that an arm is tested with.

    Attributes:
        prompt: token ids.
        sampling: the sampling setting, which may be greedy.
        num_tokens: the most tokens of its text; without `ends`, the exact number.
        index: determines the random numbers together with the seed, if the engine uses these.
        leave_after: number of tokens after which the request is left midway, so that its text is not compared; None to
            wait for the whole text.
        is_at_place: whether it is one of the many requests that continue the one place.
        ends: the first of these tokens ends the text; empty for a text with exactly `num_tokens`.
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
        """Whether the whole text is read, so that it can be tested."""
        return self.leave_after is None

    @property
    def is_greedy(self) -> bool:
        return self.sampling.decoding.temperature == 0

    def request(self, seed: int, with_logprobs: bool = False) -> Request:
        """The request as it is sent to an arm. With `with_logprobs`, the arm is to send the log-probabilities of drawn
        tokens.
        """
        decoding = replace(
            self.sampling.decoding, max_new_tokens=self.num_tokens, ignore_eos=not self.ends
        )
        return Request(
            self.prompt,
            decoding,
            seed,
            self.index,
            stop_tokens=self.ends,
            with_logprobs=with_logprobs and not self.is_greedy,
            leave_after=self.leave_after,
            # An empty answer is judged like any other text.
            may_be_empty=True,
            read_alone=True,
        )


class Answer(NamedTuple):
    """An arm's answer to a request."""

    request: PlannedRequest
    record: RequestRecord


@dataclass(frozen=True)
class Asking:
    """The settings for the requests of a run, and the function that sends them.

    Attributes:
        prompts: token ids of each prompt; none is empty.
        samplings: the sampling settings to test, in the order of `samplings=`, without those that the engine refuses or
            that the reference cannot test. The first one is used at the one place. Empty for greedy decoding.
        end_tokens: the tokens at which the target ends a text.
        can_end: whether the engine can end texts at given tokens. Each request then has such tokens with a probability
            of one half, except those at the one place and those that are left midway.
        with_logprobs: whether to request the log-probabilities of drawn tokens.
        keep: stores answers; called by `ask` with the name of the arm, its answers, and the growth of the server's
            counters meanwhile (without any counter if it has none). By default nothing is stored.
    """

    settings: RecoverySettings
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]
    end_tokens: frozenset[int]
    can_end: bool = False
    with_logprobs: bool = False
    keep: Callable[[str, Sequence[Answer], Counts], object] = lambda name, answers, counts: None

    @property
    def token_test(self) -> TokenTest:
        return TokenTest(self.settings.false_alarm_rate, self.settings.shift)

    def ask(
        self, arm: Arm, planned: Sequence[PlannedRequest], num_in_flight: int, doing: str
    ) -> list[Answer]:
        """Send requests to an arm, and return the answers in the order of the requests.

        Args:
            doing: the words for the progress line and for an error, such as `asking`.

        Raises:
            RunError: if any request failed.
        """
        requests = [request.request(self.settings.seed, self.with_logprobs) for request in planned]
        num_noted = 0
        with progress(doing, len(requests)) as advance, quick_garbage_collections():
            # `number` is how many requests have ended. It may grow by more than one.
            def note_ended(number: int) -> None:
                nonlocal num_noted
                while num_noted < number:
                    num_noted += 1
                    advance(None)

            answered = arm.answer(requests, num_in_flight, note_ended=note_ended)
        records = answered.requests
        failed = [record for record in records if record.error is not None]
        if failed:
            number = f"{len(failed)} of {len(requests)} requests"
            raise RunError(f"{number} failed {doing}: {failed[0].error}")
        answers = [Answer(*pair) for pair in zip(planned, records, strict=True)]
        self.keep(arm.name, answers, answered.counted or Counts())
        return answers


def taken_samplings(
    arm: Arm, settings: RecoverySettings, prompt: Sequence[int]
) -> tuple[list[Sampling], list[str]]:
    """The sampling settings that the engine accepts, and the names of those that it refuses.

    Both are empty for greedy decoding.

    Args:
        prompt: token ids of the prompt with which settings are tried; not empty.

    Raises:
        RunError: if the engine does not answer at all, or accepts none of the settings.
    """
    if settings.decoding.temperature == 0:
        return [], []
    tried = samplings(settings.decoding, settings.samplings)
    if engine_of(settings).own_loop:
        return tried, []
    taken = []
    for sampling in tried:
        planned = PlannedRequest(tuple(prompt), sampling, num_tokens=1, index=0)
        if why_refused(arm, planned, settings.seed) is None:
            taken.append(sampling)
    refused = [sampling.name for sampling in tried if sampling not in taken]
    if not taken:
        raise RunError(
            f"the engine refuses the sampling settings {', '.join(refused)}; name other samplings, or test"
            " greedy texts alone: decoding=greedy"
        )
    if refused:
        say(f"refused by the engine, and not tested: {', '.join(refused)}")
    return taken, refused


def why_refused(arm: Arm, planned: PlannedRequest, seed: int) -> str | None:
    """The reason why an arm refuses a request with its sampling setting; None if it answers the request.

    Raises:
        RunError: if the arm does not answer, or with an error that is no refusal.
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
    """Makes the requests of a run. With the same seed and the same answers, they are the same."""

    def __init__(self, asking: Asking) -> None:
        decoding = asking.settings.decoding
        self._prompts = [tuple(prompt) for prompt in asking.prompts]
        self._decoding = decoding
        self._samplings = asking.samplings
        self._asking = asking
        self._greedy = Sampling("greedy", replace(decoding, temperature=0.0))
        self._most = decoding.max_new_tokens
        self._generator = np.random.default_rng(asking.settings.seed)
        self._num_made = 0

    def first_turns(self, num_drawn: int) -> list[PlannedRequest]:
        """The requests of the first round, with the run's prompts and three variants of each, which begin like the
        prompt or nearly so.

        There is one greedy request for each of these prompts and variants, and `num_drawn` drawn requests with a random
        one of them. Further requests are left midway.
        """
        texts: list[tuple[int, ...]] = []
        for number, prompt in enumerate(self._prompts):
            half = prompt[: (len(prompt) + 1) // 2]
            other = self._prompts[(number + 1) % len(self._prompts)]
            half_of_each = (*half, *other[len(other) // 2 :])
            # The first token stays, because many tokenizers begin every text with the same token.
            without_second = (prompt[0], *prompt[2:])
            texts += [prompt, half, half_of_each, without_second]
        return self._with_left_ones(self._mixed(texts, num_drawn, self._prompts))

    def second_turns(
        self,
        answers: Sequence[Answer],
        num_drawn: int,
        at_place: Sequence[PlannedRequest] = (),
        num_in_flight: int = 1,
    ) -> list[PlannedRequest]:
        """The requests of the second round: drawn and greedy ones continue greedy answers to the run's prompts (one
        greedy request each), others continue the one place, and further ones are left midway.

        The requests at the one place come in groups among the others, so that several of them begin together, and their
        prompt is read once.

        Args:
            answers: the answers to the first turns.
            num_drawn: number of drawn requests that continue answers.
            at_place: the requests at the one place.
            num_in_flight: the number of requests in a group.
        """
        texts = []
        for answer in answers:
            request = answer.request
            is_of_run = request.prompt in self._prompts
            # Answers to variants of the prompts, and those that were left midway, are not continued.
            if request.is_greedy and request.is_compared and is_of_run:
                # Any prompt of the run can serve as the user's next message.
                next_turn = self._prompts[request.index % len(self._prompts)]
                text = answer.record.token_ids
                texts.append((*request.prompt, *text, *next_turn[-FOLLOW_UP:]))
        answered = [answer.record.token_ids for answer in answers]
        others = self._with_left_ones(self._mixed(texts, num_drawn, answered))
        # With the others x, y and three requests p at the place in groups of 2, the groups are [x], [y], [p, p], [p].
        groups = [[request] for request in others] + in_batches(at_place, num_in_flight)
        order = self._generator.permutation(len(groups))
        return [request for number in order for request in groups[number]]

    def at_place(self, place: tuple[int, ...], num: int) -> list[PlannedRequest]:
        """`num` requests that continue `place` with the first sampling setting, each with its own random numbers."""
        length = tokens_at_place(self._decoding)
        requests = [self._plan(place, self._samplings[0], length) for _ in range(num)]
        return [replace(request, is_at_place=True) for request in requests]

    def _with_left_ones(self, planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        """These requests and some further ones that are left midway, in random order."""
        prompts = [request.prompt for request in planned]
        mixed = list(planned)
        ways = [self._greedy, *self._samplings]
        for _ in range(len(planned) // _READ_FOR_ONE_LEFT):
            sampling = self._any(ways)
            whole = self._plan(self._any(prompts), sampling, self._most)
            leave_after = self._length(max(1, self._most // 2))
            mixed.append(replace(whole, leave_after=leave_after))
        return [mixed[number] for number in self._generator.permutation(len(mixed))]

    def _mixed(
        self,
        prompts: Sequence[tuple[int, ...]],
        num_drawn: int,
        known_texts: Sequence[Sequence[int]],
    ) -> list[PlannedRequest]:
        """A greedy request for each prompt, and `num_drawn` drawn requests, each with a random one of the prompts.
        Without sampling settings, there are no drawn requests.

        If the engine can end texts at given tokens, each of these requests has end tokens with a probability of one
        half. Models seldom generate the target's end token this early, so a random token of `known_texts` is made an
        end token, too.

        Args:
            known_texts: texts whose tokens are likely to occur in the answers.
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
                ends = self._asking.end_tokens | {self._any(known)}
                requests[number] = replace(requests[number], ends=ends)
        return requests

    def _plan(self, prompt: tuple[int, ...], sampling: Sampling, num_tokens: int) -> PlannedRequest:
        """A request with an index of its own, and so with its own random numbers."""
        self._num_made += 1
        return PlannedRequest(prompt, sampling, num_tokens, self._num_made)

    def _any(self, choices: Sequence[Any]) -> Any:
        return choices[int(self._generator.integers(len(choices)))]

    def _length(self, most: int) -> int:
        return int(self._generator.integers(1, most + 1))
