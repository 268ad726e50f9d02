"""What a loop keeps of a batch: the rows that have not ended, while others leave and join."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.decoding.protocols import Iteration, NonFiniteError, Origin
from harness.decoding.randomness import Purpose, inverse_cdf
from harness.decoding.transfer import Arriving, to_device
from harness.decoding.warp import RowWarp, Warp


@dataclass(frozen=True)
class Request:
    """What to generate, the same for every arm.

    Attributes:
        prompts: token ids of B prompts, none empty.
        uniforms: [B, at least max_new_tokens + 1, len(Purpose)] from `randomness.uniforms`, on the target's device; for
            `speculative` with `redraw` at least (max_new_tokens + 1) (K + 1).
        warp: how logits become probabilities.
        max_new_tokens: a row ends when it has this many tokens,
        stop_tokens: or after the first of these; none to generate exactly max_new_tokens.
    """

    prompts: Sequence[Sequence[int]]
    uniforms: Tensor
    warp: Warp
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()

    def cut(self, tokens: list[int], num_generated: int) -> tuple[list[int], bool]:
        """Those of `tokens` that a row with `num_generated` tokens may take, and whether the row ends with them."""
        tokens = tokens[: self.max_new_tokens - num_generated]
        for index, token in enumerate(tokens):
            if token in self.stop_tokens:
                return tokens[: index + 1], True
        return tokens, num_generated + len(tokens) == self.max_new_tokens


@dataclass(frozen=True)
class Change:
    """What a consumer may send to a loop after a record.

    Attributes:
        ended: rows that end here, even if their request goes on.
        joining: requests whose prompts join the batch; their first tokens are the next record. Its rows are numbered on
            from the last that ever joined.

    A loop that works ahead stops doing so at the first one, even an empty one. One that changes the batch must not come
    after a record without one.
    """

    ended: Collection[int] = ()
    joining: Sequence[Request] = ()

    @property
    def prompts(self) -> list[Sequence[int]]:
        """Those of all requests that join, in order."""
        return [prompt for request in self.joining for prompt in request.prompts]


Records = Generator[Iteration, Change | None, None]


# What one of several processes has in a tensor, for all of them.
Agree = Callable[[Tensor], Tensor]


def itself(numbers: Tensor) -> Tensor:
    """The only process there is has decided."""
    return numbers


@dataclass
class Rows:
    """The rows of a batch that have not ended; all lists are parallel.

    Attributes:
        agree: what is drafted and decided passes through it, so that all processes go on with the same tokens.
        numbers: as in `Iteration.rows`.
        num_generated, num_iterations: of each row until now.
        next_tokens: the last token of each, which the target has not read yet.
        ended: whether the last record was a row's last.
        uniforms: [B, P, len(Purpose)]; those of a shorter request are filled up with zeros that are never used.
        vocabulary_size: of the target's logits.
    """

    warp: RowWarp
    agree: Agree = itself
    numbers: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_generated: list[int] = field(default_factory=list)
    num_iterations: list[int] = field(default_factory=list)
    next_tokens: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    uniforms: Tensor = field(default_factory=lambda: torch.empty(0))
    num_joined: int = 0
    vocabulary_size: int = 0

    def join(self, joining: Sequence[Request], logits: Tensor) -> Iteration:
        """Append the rows of some requests, with the first tokens that the logits [B, V] after their prompts give."""
        requests = [request for request in joining for _ in request.prompts]
        parts = logits.split([len(request.prompts) for request in joining])
        tokens = []
        for request, part in zip(joining, parts, strict=True):
            tokens += self.agree(
                inverse_cdf(request.warp(part), request.uniforms[:, 0, Purpose.TARGET])
            ).tolist()
        self.vocabulary_size = logits.shape[-1]
        self.check_finite(tokens, [0] * len(tokens))
        parts = [
            *([self.uniforms] if self.numbers else []),
            *(request.uniforms for request in joining),
        ]
        length = max(part.shape[1] for part in parts)
        self.uniforms = torch.cat(
            [torch.nn.functional.pad(part, (0, 0, 0, length - part.shape[1])) for part in parts]
        )
        numbers = [self.num_joined + index for index in range(len(tokens))]
        self.num_joined += len(tokens)
        self.numbers = self.numbers + numbers
        self.requests = self.requests + requests
        self.num_generated += [1] * len(tokens)
        self.num_iterations += [0] * len(tokens)
        self.next_tokens = self.next_tokens + tokens
        ended = [
            request.cut([token], 0)[1] for request, token in zip(requests, tokens, strict=True)
        ]
        self.ended = [False] * len(self.ended) + ended
        self.warp.rows = [one.warp for one in self.requests]
        return regular_record(numbers, [[token] for token in tokens])

    def check_finite(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Raise a NonFiniteError for a token that does not exist, which is what is drawn from nan."""
        for token, position in zip(tokens, positions, strict=True):
            if token >= self.vocabulary_size:
                raise NonFiniteError("model", position)

    def all_outlast(self, count: int) -> bool:
        """Whether every row goes on after any `count` further tokens."""
        return all(
            not request.stop_tokens and generated + count < request.max_new_tokens
            for request, generated in zip(self.requests, self.num_generated, strict=True)
        )

    def take(self, decided: Sequence[list[int]]) -> list[list[int]]:
        """Give each row the tokens that were decided, at least one; returns those that it may take."""
        taken = []
        for i, tokens in enumerate(decided):
            new, self.ended[i] = self.requests[i].cut(tokens, self.num_generated[i])
            self.num_generated[i] += len(new)
            self.num_iterations[i] += 1
            taken.append(new)
        self.next_tokens = [tokens[-1] for tokens in decided]
        return taken

    def take_drawn(self, tokens: Sequence[int]) -> Iteration:
        """Give each row the token that was drawn from the target -> their record."""
        self.check_finite(tokens, self.num_generated)
        return regular_record(self.numbers, self.take([[token] for token in tokens]))

    def going_on(self, ended: Collection[int] = ()) -> list[int]:
        """The rows that have not ended, nor are among these numbers, as positions in the lists."""
        return [
            i for i, number in enumerate(self.numbers) if not self.ended[i] and number not in ended
        ]

    def select(self, kept: list[int]) -> None:
        self.numbers = [self.numbers[i] for i in kept]
        self.requests = [self.requests[i] for i in kept]
        self.num_generated = [self.num_generated[i] for i in kept]
        self.num_iterations = [self.num_iterations[i] for i in kept]
        self.next_tokens = [self.next_tokens[i] for i in kept]
        self.ended = [False] * len(kept)
        if kept:
            self.uniforms = self.uniforms[to_device(kept, self.uniforms.device)]
        self.warp.rows = [one.warp for one in self.requests]

    def uniforms_from(self, positions: Sequence[int], count: int) -> Tensor:
        """`count` uniforms per row, starting at each row's own position: [B, count, len(Purpose)]."""
        uniforms = self.uniforms
        if not isinstance(positions, Arriving) and len(set(positions)) == 1:
            return uniforms[:, positions[0] : positions[0] + count]
        index = to_device(positions, uniforms.device).unsqueeze(1) + torch.arange(
            count, device=uniforms.device
        )
        # A row near its end may not need them all; positions beyond the stream are never decided.
        index = index.clamp(max=uniforms.shape[1] - 1)
        return uniforms[torch.arange(len(positions), device=uniforms.device).unsqueeze(1), index]


def regular_record(rows: list[int], tokens: list[list[int]]) -> Iteration:
    """The record of tokens drawn from the target, one per row."""
    return Iteration(rows, tokens, [[Origin.TARGET]] * len(rows), [[]] * len(rows), [0] * len(rows))
