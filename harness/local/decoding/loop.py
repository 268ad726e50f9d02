"""Regular and speculative decoding of a batch, whose rows begin together. One that has ended rests until all have.

An iteration is Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2, in every row at
once; `docs/method.md` has it for one row alone.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from harness.engines.arrivals import Origin, origins
from harness.local.decoding.iteration import BatchSize, Calls
from harness.local.decoding.protocols import NonFiniteError, Step, TensorDrafter
from harness.local.decoding.randomness import Purpose, inverse_cdf
from harness.local.decoding.warp import Warp


@dataclass(frozen=True)
class RowRequest:
    """A prompt that is to be continued.

    Attributes:
        prompt: its token ids, at least one.
        uniforms: [at least max_new_tokens + 1, len(Purpose)] from `randomness.uniforms`, on the
            target's device; (max_new_tokens + 1) (K + 1) where a loop redraws.
        warp: how logits become probabilities.
        max_new_tokens: the row ends when it has this many tokens, if not before.
        stop_tokens: the row ends after the first of these.
        leave_after: the row ends with the iteration in which it has this many tokens; None for never.
    """

    prompt: Sequence[int]
    uniforms: Tensor
    warp: Warp
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    leave_after: int | None = None


def size_of(requests: Sequence[RowRequest]) -> BatchSize:
    """The size of a batch of requests."""
    return BatchSize(
        num_rows=len(requests),
        num_positions=max(len(request.uniforms) for request in requests),
        most_tokens=max(len(request.prompt) + request.max_new_tokens for request in requests),
    )


@dataclass
class BatchRow:
    """One sequence of a batch.

    Attributes:
        number: its place in the batch, from 0.
        has_ended: also of a row that only fills the batch up.
    """

    number: int
    request: RowRequest
    num_generated: int = 0
    has_ended: bool = False

    @property
    def length(self) -> int | None:
        """How many of its tokens the target has read; None if it has ended."""
        return None if self.has_ended else len(self.request.prompt) + self.num_generated - 1

    @property
    def limit(self) -> int:
        """How many tokens it can be offered: its last one is never offered."""
        return 0 if self.has_ended else self.request.max_new_tokens - self.num_generated - 1

    def take(self, numbers: Sequence[float], vocabulary_size: int) -> RowStep:
        """Take what was decided, a row of `Decided.packed`, up to the end of the row.

        Raises:
            NonFiniteError: a model gave no number for a token of this iteration.
        """
        if self.has_ended:
            return RowStep(self.number, [])
        count = (len(numbers) - 3) // 3
        num_accepted, next_token, num_offered = map(int, numbers[:3])
        proposed = list(map(int, numbers[3 : 3 + num_offered]))
        target = numbers[3 + count :][:num_offered]
        draft = numbers[3 + 2 * count :][:num_offered]
        # All that was offered must be finite, not only what was accepted: a rule may accept a
        # token whatever the target's probability of it is (`AcceptByCoin`).
        for role, probabilities in (("model", target), ("draft", draft)):
            for place, probability in enumerate(probabilities):
                if math.isnan(probability):
                    raise NonFiniteError(role, self.num_generated + place, self.number)
        # `inverse_cdf` draws a token beyond the vocabulary from nan.
        if next_token >= vocabulary_size:
            raise NonFiniteError("model", self.num_generated + num_accepted, self.number)
        tokens = [*proposed[:num_accepted], next_token]
        tokens = tokens[: self.request.max_new_tokens - self.num_generated]
        finish_reason: Literal["stop", "length"] | None = None
        for index, token in enumerate(tokens):
            if token in self.request.stop_tokens:
                tokens = tokens[: index + 1]
                finish_reason = "stop"
                break
        self.num_generated += len(tokens)
        most = self.request.leave_after or self.request.max_new_tokens
        if not finish_reason and self.num_generated >= min(most, self.request.max_new_tokens):
            finish_reason = "length"
        self.has_ended = finish_reason is not None
        rejection = None
        if num_accepted < num_offered:
            rejection = target[num_accepted], draft[num_accepted]
        return RowStep(self.number, tokens, proposed, num_accepted, rejection, finish_reason)


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row's part of an iteration.

    Attributes:
        row: its number: the place of its request in the batch, from 0.
        tokens: the tokens it gained, at least one, cut after a stop token or at the length limit; none if it had ended.
        proposed: the draft tokens verified; empty in regular decoding.
        num_accepted: how many of `proposed` were accepted.
        rejection: the probability of the first rejected token under the target, and under the
            drafter; None if no token was rejected. Two steps that differ in its rounding are equal.
        finish_reason: why the row ends with this step; None if it goes on, or where nobody says.
    """

    row: int
    tokens: list[int]
    proposed: list[int] = field(default_factory=list)
    num_accepted: int = 0
    rejection: tuple[float, float] | None = field(default=None, compare=False)
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def origins(self) -> list[Origin]:
        """Where each of `tokens` comes from."""
        return origins(len(self.proposed), self.num_accepted, len(self.tokens))

    @property
    def outcome(self) -> tuple[int, int]:
        """The numbers of proposed and of accepted tokens, up to the end of the row.

        An answer that ends with an accepted token counts as one that ends there for its length, whose last token is
        never drafted: five of eight accepted, of which the third is a stop token, are two of two. So iterations have
        as many tokens as they gave.
        """
        num_tokens = len(self.tokens)
        if num_tokens > self.num_accepted:
            return len(self.proposed), self.num_accepted
        return num_tokens - 1, num_tokens - 1


# Gets the phase that begins: `prompts`, then `drafting`, `forward`, and `host` behind the calls of an iteration.
# Nothing waits for the device.
Watch = Callable[[str], None]


def unwatched(phase: str) -> None:
    """A watch that does nothing."""


class Loop:
    """Decodes the rows of some requests together: `start` them, and take a `step` while rows go on.

    Args:
        calls: of an iteration; loops that share them decode one after the other.
        watch: of its iterations.

    Attributes:
        num_decided: the tokens that iterations have decided, by whether prepared calls did.
    """

    def __init__(self, calls: Calls, watch: Watch = unwatched) -> None:
        self._calls = calls
        self._watch = watch
        self._rows: list[BatchRow] = []
        self.num_decided: Counter[bool] = Counter()
        # Lets the drafter read the prompts, which only the target has read.
        self._begin_drafting: Callable[[], None] | None = None

    @property
    def num_running(self) -> int:
        """The rows that have not ended."""
        return sum(not row.has_ended for row in self._rows)

    def start(self, requests: Sequence[RowRequest], *, alone: bool = False) -> list[RowStep]:
        """Read the prompts of requests, and decide their first tokens.

        Args:
            alone: as of `Runner.start`.

        Raises:
            NonFiniteError: as `step`.
        """
        self._watch("prompts")
        calls = self._calls
        device = requests[0].uniforms.device
        rows = calls.rows_for(size_of(requests), device)
        self._state = rows
        self._rows = [BatchRow(number, request) for number, request in enumerate(requests)]
        for number in range(len(requests), rows.num_rows):
            self._rows.append(BatchRow(number, requests[0], has_ended=True))
        prompts = [row.request.prompt for row in self._rows]
        step = calls.target.start(prompts, rows.num_slots, alone=alone)

        calls.warp.set_rows([request.warp for request in requests], device)
        uniforms = torch.stack([row.request.uniforms[:1, Purpose.TARGET] for row in self._rows])
        first_tokens = inverse_cdf(calls.warp(step.logits), uniforms).flatten().tolist()
        if calls.drafter is not None:
            # With the next call, because a reader waits for the first tokens.
            self._begin_drafting = functools.partial(
                calls.drafter.start, prompts, first_tokens, step
            )
            if isinstance(calls.drafter, TensorDrafter):
                calls.drafter.make_room(rows.num_rows, calls.num_draft_tokens, rows.num_slots)

        for row, (request, token) in enumerate(zip(requests, first_tokens, strict=False)):
            rows.begin(row, request.prompt, token, request.max_new_tokens, request.uniforms)
        row_steps = self._taken([[0, token, 0] for token in first_tokens], step)
        return [row_step for row_step in row_steps if row_step.tokens]

    def step(self) -> list[RowStep]:
        """Decide further tokens of all rows that have not ended, at least one of each.

        Raises:
            NonFiniteError: logits that are no numbers. Caches hold them too: the loop ends, and its runners are closed.
        """
        if self._begin_drafting is not None:
            self._begin_drafting()
            self._begin_drafting = None
        calls, rows = self._calls, self._state
        # K tokens for each row, or as many as it may still take before its last one. So the caches never hold more than
        # prompt, `max_new_tokens` and K.
        limits = [row.limit for row in self._rows]
        count = min(calls.num_draft_tokens, max(limits))
        if rows.lengths is not None:
            rows.lengths = [row.length for row in self._rows]
        elif count > 0:
            # Prepared calls draft K.
            count = calls.num_draft_tokens

        proposal = None
        if count > 0:
            self._watch("drafting")
            proposal = calls.propose(rows, count, [min(count, limit) for limit in limits])
        self._watch("forward")
        packed, step = calls.decide(rows, proposal)
        self._watch("host")
        row_steps = self._taken(packed.tolist(), step)
        tokens = [row_step.tokens for row_step in row_steps]
        self.num_decided[calls.was_prepared] += sum(map(len, tokens))
        drafter = calls.drafter
        if drafter is not None and not isinstance(drafter, TensorDrafter):
            num_accepted = [row_step.num_accepted for row_step in row_steps]
            drafter.observe(num_accepted, tokens, step)
        return [row_step for row_step in row_steps if row_step.tokens]

    def _taken(self, numbers: Sequence[Sequence[float]], step: Step) -> list[RowStep]:
        """Let each row take what was decided, and rest if that ends it; returns a step of each."""
        size = step.logits.shape[-1]
        row_steps = [
            row.take(of_row, size) for row, of_row in zip(self._rows, numbers, strict=True)
        ]
        ended = [row_step.row for row_step in row_steps if row_step.finish_reason is not None]
        if ended:
            self._state.rest(ended)
        return row_steps
