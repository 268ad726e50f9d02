"""The requests of `recovery load=8`: mixed lengths, prompts that begin alike, second turns.

Neighbours draw in other ways, and some are left midway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.config.settings import DecodingSettings
from harness.engines.protocol import LoadRequest, Question
from harness.experiments.samplings import Sampling

# The most tokens of a drawn text: short texts test more first tokens.
_MOST_DRAWN = 16
# Tokens of another prompt that follow an answer as the next turn.
FOLLOW_UP = 8
# For each request that is left midway, this many are read to their end.
_READ_FOR_ONE_LEFT = 7


def most_drawn(max_new_tokens: int) -> int:
    """The most tokens of a drawn text; every length up to it is as likely."""
    return min(max_new_tokens, _MOST_DRAWN)


@dataclass(frozen=True)
class PlannedRequest:
    """A request of the load.

    Attributes:
        index: with the seed it determines the random numbers, where the engine takes them.
        leave_after: see `LoadRequest`; the text is then not compared.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    num_tokens: int
    index: int
    leave_after: int | None = None

    @property
    def is_compared(self) -> bool:
        return self.leave_after is None

    @property
    def is_greedy(self) -> bool:
        return self.sampling.decoding.temperature == 0

    def request(self, seed: int) -> LoadRequest:
        """The request as an arm takes it; no token ends it, so that every text has its length."""
        decoding = dataclasses.replace(
            self.sampling.decoding, max_new_tokens=self.num_tokens, ignore_eos=True
        )
        question = Question([self.prompt], decoding, seed, [self.index])
        return LoadRequest(question, self.sampling.parameters, self.leave_after)


class Workload:
    """Makes the requests of a run, always the same ones for a seed.

    Args:
        prompts: token ids, none empty.
        samplings: that are tested.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        decoding: DecodingSettings,
        seed: int,
    ) -> None:
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._samplings = samplings
        self._greedy = Sampling("greedy", dataclasses.replace(decoding, temperature=0.0))
        self._most = decoding.max_new_tokens
        self._generator = np.random.default_rng(seed)
        self._num_made = 0

    def first_turns(self, num_drawn: int) -> list[PlannedRequest]:
        """Requests with the run's prompts, and with others that begin like them or nearly so."""
        return self._mixed(list(self._alike()), num_drawn)

    def second_turns(
        self, planned: Sequence[PlannedRequest], answers: Sequence[Sequence[int]], num_drawn: int
    ) -> list[PlannedRequest]:
        """Requests that go on after greedy answers to the prompts of the run."""
        texts = []
        for request, answer in zip(planned, answers, strict=True):
            is_of_run = request.prompt in self._prompts
            if request.is_greedy and request.is_compared and is_of_run:
                following = self._prompts[request.index % len(self._prompts)]
                texts.append((*request.prompt, *answer, *following[-FOLLOW_UP:]))
        return self._mixed(texts, num_drawn)

    def repeated(
        self, prompt: Sequence[int], sampling: Sampling, num: int, num_tokens: int
    ) -> list[PlannedRequest]:
        """The same request over and over, each with random numbers of its own."""
        return [self._plan(tuple(prompt), sampling, num_tokens) for _ in range(num)]

    def shuffled(self, planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        """The requests in a random order, with some among them that are left midway."""
        texts = [request.prompt for request in planned]
        mixed = list(planned)
        for _ in range(len(planned) // _READ_FOR_ONE_LEFT):
            mixed.append(self._left_midway(texts))
        return [mixed[place] for place in self._generator.permutation(len(mixed))]

    def _alike(self) -> Iterator[tuple[int, ...]]:
        for place, prompt in enumerate(self._prompts):
            other = self._prompts[(place + 1) % len(self._prompts)]
            half = prompt[: (len(prompt) + 1) // 2]
            yield prompt
            yield half
            yield (*half, *other[len(other) // 2 :])
            # The beginning that many tokenizers put before a text stays.
            yield (prompt[0], *prompt[2:])

    def _mixed(self, texts: Sequence[tuple[int, ...]], num_drawn: int) -> list[PlannedRequest]:
        requests = []
        for text in texts:
            length = self._length(self._most)
            requests.append(self._plan(text, self._greedy, length))
        num_drawn = num_drawn if self._samplings else 0
        for number in range(num_drawn):
            sampling = self._samplings[number % len(self._samplings)]
            length = self._length(most_drawn(self._most))
            requests.append(self._plan(self._any(texts), sampling, length))
        return self.shuffled(requests)

    def _left_midway(self, texts: Sequence[tuple[int, ...]]) -> PlannedRequest:
        ways = [self._greedy, *self._samplings]
        sampling = ways[int(self._generator.integers(len(ways)))]
        planned = self._plan(self._any(texts), sampling, self._most)
        return dataclasses.replace(planned, leave_after=self._length(max(1, self._most // 2)))

    def _plan(self, prompt: tuple[int, ...], sampling: Sampling, num_tokens: int) -> PlannedRequest:
        self._num_made += 1
        return PlannedRequest(prompt, sampling, num_tokens, self._num_made)

    def _any(self, texts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return texts[int(self._generator.integers(len(texts)))]

    def _length(self, most: int) -> int:
        return int(self._generator.integers(1, most + 1))
