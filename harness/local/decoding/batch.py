"""The rows of a running batch: what each was asked for, and how far it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from harness.engines.arrivals import Origin
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.protocols import NonFiniteError
from harness.local.decoding.randomness import Purpose, inverse_cdf
from harness.local.decoding.transfer import to_device
from harness.local.decoding.warp import BatchWarp, Warp


@dataclass(frozen=True)
class Request:
    """A batch to be generated, the same for every arm.

    Attributes:
        prompts: token ids of B prompts, none empty.
        uniforms: [B, at least max_new_tokens + 1, len(Purpose)] from `randomness.uniforms`, on the
            target's device; (max_new_tokens + 1) (K + 1) where each iteration needs numbers of its
            own, see `Rows.turn_uniforms`.
        warp: how logits become probabilities.
        max_new_tokens: a row ends when it has this many tokens, if not before.
        stop_tokens: a row ends after the first of these.
        keeps_logits: whether records hand on the logits of its rows.
    """

    prompts: Sequence[Sequence[int]]
    uniforms: Tensor
    warp: Warp
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    keeps_logits: bool = False

    def cut(self, tokens: list[int], num_generated: int) -> tuple[list[int], bool]:
        """Return the tokens that a row with `num_generated` tokens may take, and whether it then
        ends.
        """
        tokens = tokens[: self.max_new_tokens - num_generated]
        for index, token in enumerate(tokens):
            if token in self.stop_tokens:
                return tokens[: index + 1], True
        return tokens, num_generated + len(tokens) == self.max_new_tokens


class TurnUniforms(NamedTuple):
    """The random numbers of a turn, in the order of `randomness.Purpose`."""

    draft: Tensor  # [B, K]
    accept: Tensor  # [B, K]
    target: Tensor  # [B, K + 1]


@dataclass
class Row:
    """One sequence of a batch, from its first token on.

    Attributes:
        number: rows are numbered in the order in which they joined, from 0.
        last_token: decided, but not read by the target yet.
        ended: whether the row has had its last record.
    """

    number: int
    request: Request
    last_token: int
    ended: bool
    num_generated: int = 1
    num_iterations: int = 0

    def take(self, tokens: list[int]) -> list[int]:
        """Add tokens that were decided, at least one; returns those that the row may take."""
        taken, self.ended = self.request.cut(tokens, self.num_generated)
        self.num_generated += len(taken)
        self.num_iterations += 1
        self.last_token = tokens[-1]
        return taken


@dataclass
class Rows:
    """The rows of a batch: those that go on, and those that have ended since the last `select`.

    Attributes:
        warp: of the rows; the loop's drafter may share it.
        members: the rows, in the order of the target's.
        uniforms: [B, P, len(Purpose)], of each row's positions; those of a shorter request are
            filled up with zeros that are never used.
        num_joined: how many rows ever joined.
        vocabulary_size: of the target's logits.
    """

    warp: BatchWarp
    members: list[Row] = field(default_factory=list)
    uniforms: Tensor = field(default_factory=lambda: torch.empty(0))
    num_joined: int = 0
    vocabulary_size: int = 0

    @property
    def num_generated(self) -> list[int]:
        """How many tokens each row has."""
        return [row.num_generated for row in self.members]

    @property
    def last_tokens(self) -> list[int]:
        """The last token of each row, which the target reads in the next turn."""
        return [row.last_token for row in self.members]

    def join(self, joining: Sequence[Request], logits: Tensor) -> Iteration:
        """Append the rows of some requests, with the first tokens that the logits [B, V] after
        their prompts give.
        """
        self.vocabulary_size = logits.shape[-1]
        parts = logits.split([len(request.prompts) for request in joining])
        begun: list[Row] = []
        kept_logits: dict[int, Tensor] = {}
        for request, after_prompts in zip(joining, parts, strict=True):
            drawn = inverse_cdf(request.warp(after_prompts), request.uniforms[:, 0, Purpose.TARGET])
            for place, token in enumerate(drawn.tolist()):
                number = self.num_joined + len(begun)
                self.check_exists(token, 0, number)
                _, ended = request.cut([token], 0)
                if request.keeps_logits:
                    kept_logits[number] = after_prompts[place : place + 1]
                begun.append(
                    Row(
                        number=number,
                        request=request,
                        last_token=token,
                        ended=ended,
                    )
                )
        self._append_uniforms([request.uniforms for request in joining])
        self.members = [*self.members, *begun]
        self.num_joined += len(begun)
        self._set_warps()
        num_rows = len(begun)
        return Iteration(
            rows=[row.number for row in begun],
            tokens=[[row.last_token] for row in begun],
            origins=[[Origin.TARGET]] * num_rows,
            proposed=[[]] * num_rows,
            num_accepted=[0] * num_rows,
            logits=kept_logits,
        )

    def check_exists(self, token: int, position: int, row: int) -> None:
        """Raise a NonFiniteError for a token beyond the vocabulary, which `inverse_cdf` draws from
        nan.
        """
        if token >= self.vocabulary_size:
            raise NonFiniteError("model", position, row)

    def going_on(self) -> list[int]:
        """Return positions of the rows that have not ended."""
        return [position for position, row in enumerate(self.members) if not row.ended]

    def end(self, numbers: Collection[int]) -> None:
        """End the rows with these numbers, those of them that are in the batch."""
        for row in self.members:
            if row.number in numbers:
                row.ended = True

    def select(self, positions: list[int]) -> None:
        """Continue with the rows at these positions."""
        self.members = [self.members[position] for position in positions]
        if positions:
            self.uniforms = self.uniforms[to_device(positions, self.uniforms.device)]
            self._set_warps()

    def draft_limits(self, num_draft_tokens: int) -> list[int]:
        """Return how many tokens to draft for each row: no more than it may still take.

        So the cache never holds more than prompt and `max_new_tokens`.
        """
        # The last token of a row is the next token of a verdict, so one fewer needs to be drafted
        # than is missing. Each row has its own limit, however many tokens the others need: an
        # answer must not depend on its batch.
        return [
            min(num_draft_tokens, row.request.max_new_tokens - row.num_generated - 1)
            for row in self.members
        ]

    def turn_uniforms(self, count: int, num_per_iteration: int = 0) -> TurnUniforms:
        """Return the random numbers of a turn that drafts up to `count` tokens for each row.

        Args:
            num_per_iteration: 0: a position keeps its numbers until its token is decided. Otherwise
                drafting and accepting take numbers that no other iteration takes, of which each
                iteration has this many: for rules by which a rejection depends on later tokens
                (block verification). A position that is drafted again must then not meet the
                numbers by which it was rejected, see `randomness`.

        With max_new_tokens=64 and 4 numbers per iteration a row's stream has 65 entries by
        position, then a block of 4 for each iteration.
        """
        by_position = self.uniforms_from(self.num_generated, count + 1)
        own = by_position[:, :count]
        if num_per_iteration:
            starts: list[int] = []
            for row in self.members:
                num_positions = row.request.max_new_tokens + 1
                starts.append(num_positions + row.num_iterations * num_per_iteration)
            own = self.uniforms_from(starts, count)
        return TurnUniforms(
            draft=own[..., Purpose.DRAFT],
            accept=own[..., Purpose.ACCEPT],
            target=by_position[..., Purpose.TARGET],
        )

    def uniforms_from(self, positions: Sequence[int], count: int) -> Tensor:
        """Return `count` uniforms per row, starting at each row's own position: [B, count,
        len(Purpose)].
        """
        uniforms = self.uniforms
        if len(set(positions)) == 1:
            start = positions[0]
            return uniforms[:, start : start + count]
        device = uniforms.device
        starts = to_device(positions, device).unsqueeze(1)
        index = starts + torch.arange(count, device=device)
        # A row near its end may not need them all; positions beyond the stream are never decided.
        index = index.clamp(max=uniforms.shape[1] - 1)
        rows = torch.arange(len(positions), device=device).unsqueeze(1)
        return uniforms[rows, index]

    def _append_uniforms(self, joining: list[Tensor]) -> None:
        streams = [self.uniforms, *joining] if self.members else joining
        length = max(stream.shape[1] for stream in streams)
        padded = [
            torch.nn.functional.pad(stream, (0, 0, 0, length - stream.shape[1]))
            for stream in streams
        ]
        self.uniforms = torch.cat(padded)

    def _set_warps(self) -> None:
        self.warp.set_rows([row.request.warp for row in self.members])
