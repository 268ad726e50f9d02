"""The requests of `recovery load=8`, of which a mistake in a batch or a cache should spoil some.

They have mixed lengths, prompts that begin alike, second turns and different sampling settings, and
some are left midway. They come in two rounds (`first_turns`, `second_turns`). A `Sampling` knows the
exact distribution of each token that it asks for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from harness.commands.recovery.prefix_distribution import exact_probabilities
from harness.commands.recovery.record import SamplingName
from harness.config.settings import DecodingSettings
from harness.engines.protocol import LoadRequest, Question
from harness.results.statistics.arrays import Floats

# The most tokens of a drawn text: short texts test more first tokens.
_MOST_DRAWN = 16
# Tokens of another prompt that follow an answer as the next turn.
FOLLOW_UP = 8
# For each request that is left midway, this many are read to their end.
_READ_FOR_ONE_LEFT = 7


@dataclass(frozen=True)
class Sampling:
    """How a request asks for its tokens to be drawn.

    Attributes:
        name: for reports.
        parameters: of a server's API, with OpenAI's and vLLM's names: `min_p`, `presence_penalty`,
            `frequency_penalty`, `repetition_penalty`, `logit_bias`.
        penalises_prompts: whether presence and frequency penalties count the prompt's tokens too.
    """

    name: str
    decoding: DecodingSettings
    parameters: Mapping[str, Any] = field(default_factory=dict)
    penalises_prompts: bool = False

    @property
    def asks_logprobs(self) -> bool:
        """Whether log-probabilities come with the tokens."""
        return "logprobs" in self.parameters

    def probabilities_along(
        self, logits: Tensor, prompt: Sequence[int], text: Sequence[int]
    ) -> Floats:
        """The distribution [n, V] that each token of a text was to be drawn from.

        Args:
            logits: [n, V], the model's own before each token.
        """
        values = logits.double().cpu()
        for token, bias in self.parameters.get("logit_bias", {}).items():
            values[:, int(token)] += bias
        values = self._penalised(values, prompt, text)
        probabilities = exact_probabilities(values, self.decoding)
        # A reference gives tokens that it does not know the same logit, the lowest one. What
        # truncation leaves of their mass is theirs together, as their quantiles are.
        lowest = torch.where(values.isinf(), torch.inf, values).amin(-1, keepdim=True)
        alike = (values == lowest).numpy()
        mass = (probabilities * alike).sum(-1, keepdims=True)
        probabilities = np.where(alike, mass / alike.sum(-1, keepdims=True), probabilities)
        least = self.parameters.get("min_p", 0.0) * probabilities.max(-1, keepdims=True)
        probabilities = probabilities * (probabilities >= least)
        return probabilities / probabilities.sum(-1, keepdims=True)

    def _penalised(self, logits: Tensor, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        """Logits [n, V] with the penalties for tokens that came before.

        The repetition penalty counts prompt and text, as in transformers; the others count the text
        alone, or both.
        """
        if not self.parameters:
            return logits
        size = logits.shape[-1]
        tokens = torch.tensor(text)
        # [n, V]: how often each token came in the text before, and [V] in the prompt.
        counts = one_hot(tokens, size).cumsum(0) - one_hot(tokens, size)
        in_prompt = one_hot(torch.tensor(prompt), size).sum(0)
        repetition = self.parameters.get("repetition_penalty", 1.0)
        if repetition != 1:
            seen = counts + in_prompt > 0
            lowered = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(seen, lowered, logits)
        if self.penalises_prompts:
            counts = counts + in_prompt
        frequency = self.parameters.get("frequency_penalty", 0.0)
        presence = self.parameters.get("presence_penalty", 0.0)
        return logits - frequency * counts - presence * (counts > 0)


def samplings(
    decoding: DecodingSettings,
    biased: Sequence[int],
    penalises_prompts: bool = False,
    names: Sequence[SamplingName] = get_args(SamplingName),
) -> list[Sampling]:
    """The sampling settings to try: the run's own, and others one at a time.

    These are tried at another temperature than the run's, without its top-k and top-p.

    Args:
        biased: tokens whose logits `logit_bias` raises.
        penalises_prompts: whether presence and frequency penalties count the prompt's tokens too.
        names: of those that are wanted.
    """
    other = 1.0 if decoding.temperature != 1 else 0.7
    plain = dataclasses.replace(decoding, temperature=other, top_k=0, top_p=1.0)
    known: dict[SamplingName, Sampling] = {
        "as_asked": Sampling("as asked", decoding),
        "temperature": Sampling(f"temperature={other:g}", plain),
        "top_k": Sampling("top_k=5", dataclasses.replace(plain, top_k=5)),
        "top_p": Sampling("top_p=0.8", dataclasses.replace(plain, top_p=0.8)),
    }
    extras: dict[SamplingName, Any] = {
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {str(token): 1.0 for token in biased},
    }
    known["logprobs"] = Sampling("log-probabilities", decoding, {"logprobs": 1})
    known["logprobs_whole"] = Sampling(
        "log-probabilities, no stream", plain, {"logprobs": 1, "stream": False}
    )
    for name, value in extras.items():
        shown = name if name == "logit_bias" else f"{name}={value:g}"
        known[name] = Sampling(shown, plain, {name: value}, penalises_prompts)
    return [known[name] for name in names]


def most_drawn(max_new_tokens: int) -> int:
    """The most tokens of a drawn text; every length up to it is as likely."""
    return min(max_new_tokens, _MOST_DRAWN)


@dataclass(frozen=True)
class PlannedRequest:
    """A request of the load.

    Attributes:
        num_tokens: the length of its text.
        index: with the seed it determines the random numbers, where the engine takes them.
        leave_after: tokens after which nobody waits for the rest, so that the text is not compared;
            None to wait for all.
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
        samplings: sampling settings that are tested, beside greedy requests.
        decoding: of the run; its `max_new_tokens` is the most that a text has.
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
        """Requests with the run's prompts, and with others that begin like them or nearly so.

        One greedy request for each prompt, and `num_drawn` whose prompts are any of these.
        """
        return self._mixed(list(self._alike()), num_drawn)

    def second_turns(
        self, planned: Sequence[PlannedRequest], answers: Sequence[Sequence[int]], num_drawn: int
    ) -> list[PlannedRequest]:
        """Requests that go on after greedy answers to the prompts of the run.

        Args:
            planned: the first turns.
            answers: their token ids.
        """
        texts = []
        for request, answer in zip(planned, answers, strict=True):
            is_of_run = request.prompt in self._prompts
            if request.is_greedy and request.is_compared and is_of_run:
                # Any prompt of the run serves as what the user says next.
                next_turn = self._prompts[request.index % len(self._prompts)]
                texts.append((*request.prompt, *answer, *next_turn[-FOLLOW_UP:]))
        return self._mixed(texts, num_drawn)

    def repeated(
        self, prompt: Sequence[int], sampling: Sampling, num: int, num_tokens: int
    ) -> list[PlannedRequest]:
        """The same request over and over, each with random numbers of its own."""
        return [self._plan(tuple(prompt), sampling, num_tokens) for _ in range(num)]

    def shuffled(self, planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        """The requests in a random order, with some among them that are left midway."""
        prompts = [request.prompt for request in planned]
        mixed = list(planned)
        for _ in range(len(planned) // _READ_FOR_ONE_LEFT):
            mixed.append(self._left_midway(prompts))
        return [mixed[number] for number in self._generator.permutation(len(mixed))]

    def _alike(self) -> Iterator[tuple[int, ...]]:
        """Each prompt; its first half; that half, then the second half of another prompt; the
        prompt without its second token.
        """
        for number, prompt in enumerate(self._prompts):
            other = self._prompts[(number + 1) % len(self._prompts)]
            half = prompt[: (len(prompt) + 1) // 2]
            yield prompt
            yield half
            yield (*half, *other[len(other) // 2 :])
            # The first token stays: many tokenizers put it before every text.
            yield (prompt[0], *prompt[2:])

    def _mixed(self, prompts: Sequence[tuple[int, ...]], num_drawn: int) -> list[PlannedRequest]:
        """A greedy request for each prompt, and drawn ones for any, in a random order."""
        requests = []
        for prompt in prompts:
            length = self._length(self._most)
            requests.append(self._plan(prompt, self._greedy, length))
        num_drawn = num_drawn if self._samplings else 0
        for number in range(num_drawn):
            sampling = self._samplings[number % len(self._samplings)]
            length = self._length(most_drawn(self._most))
            requests.append(self._plan(self._any(prompts), sampling, length))
        return self.shuffled(requests)

    def _left_midway(self, prompts: Sequence[tuple[int, ...]]) -> PlannedRequest:
        ways = [self._greedy, *self._samplings]
        sampling = ways[int(self._generator.integers(len(ways)))]
        planned = self._plan(self._any(prompts), sampling, self._most)
        return dataclasses.replace(planned, leave_after=self._length(max(1, self._most // 2)))

    def _plan(self, prompt: tuple[int, ...], sampling: Sampling, num_tokens: int) -> PlannedRequest:
        self._num_made += 1
        return PlannedRequest(prompt, sampling, num_tokens, self._num_made)

    def _any(self, prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return prompts[int(self._generator.integers(len(prompts)))]

    def _length(self, most: int) -> int:
        return int(self._generator.integers(1, most + 1))
