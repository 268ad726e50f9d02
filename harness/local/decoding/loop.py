"""Regular and speculative decoding of a batch that rows leave between iterations.

An iteration is Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2, in every row at
once; `reference.py` has it for one row alone.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.engines.arrivals import Origin, origins
from harness.local.decoding.iteration import Calls
from harness.local.decoding.protocols import NonFiniteError, TensorDrafter
from harness.local.decoding.randomness import Purpose, inverse_cdf
from harness.local.decoding.state import RowState
from harness.local.decoding.warp import BatchWarp, Warp


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


@dataclass
class BatchRow:
    """One sequence of a batch.

    Attributes:
        number: its place among the requests, from 0.
    """

    number: int
    request: RowRequest
    num_generated: int = 0
    has_ended: bool = False

    def take(self, numbers: Sequence[float], vocabulary_size: int) -> RowStep:
        """Take what was decided, a row of `Decided.packed`, up to the end of the row.

        Raises:
            NonFiniteError: a model gave no number for a token of this iteration.
        """
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
        for index, token in enumerate(tokens):
            if token in self.request.stop_tokens:
                tokens = tokens[: index + 1]
                self.has_ended = True
                break
        self.num_generated += len(tokens)
        most = self.request.leave_after or self.request.max_new_tokens
        if self.num_generated >= min(most, self.request.max_new_tokens):
            self.has_ended = True
        rejection = None
        if num_accepted < num_offered:
            rejection = target[num_accepted], draft[num_accepted]
        return RowStep(self.number, tokens, proposed, num_accepted, rejection)


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row's part of an iteration.

    Attributes:
        row: its number: the place of its request in the batch, from 0.
        tokens: the tokens it gained, at least one, cut after a stop token or at the length limit.
        proposed: the draft tokens verified; empty in regular decoding.
        num_accepted: how many of `proposed` were accepted.
        rejection: the probability of the first rejected token under the target, and under the
            drafter; None if no token was rejected. Two steps that differ in its rounding are equal.
    """

    row: int
    tokens: list[int]
    proposed: list[int] = field(default_factory=list)
    num_accepted: int = 0
    rejection: tuple[float, float] | None = field(default=None, compare=False)

    @property
    def origins(self) -> list[Origin]:
        """Where each of `tokens` comes from."""
        return origins(len(self.proposed), self.num_accepted, len(self.tokens))


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
        self._target = calls.target
        self._drafter = calls.drafter
        self._watch = watch
        self._rows: list[BatchRow] = []
        self._state = RowState.resting(0, 0, "cpu")
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
        self._rows = [BatchRow(number, request) for number, request in enumerate(requests)]
        prompts = [request.prompt for request in requests]
        most_tokens = max(len(request.prompt) + request.max_new_tokens for request in requests)
        # A draft model's last pass, of two tokens, begins at the last token.
        num_slots = most_tokens + calls.num_draft_tokens + 1
        step = self._target.start(prompts, num_slots, alone=alone)
        device = step.logits.device

        warp = BatchWarp()
        warp.set_rows([request.warp for request in requests], device)
        uniforms = torch.stack([request.uniforms[:1, Purpose.TARGET] for request in requests])
        drawn = inverse_cdf(warp(step.logits), uniforms).flatten()
        first_tokens = drawn.tolist()
        if self._drafter is not None:
            # With the next call, because a reader waits for the first tokens.
            self._begin_drafting = functools.partial(
                self._drafter.start, prompts, first_tokens, step
            )
            if isinstance(self._drafter, TensorDrafter):
                self._drafter.make_room(len(requests), calls.num_draft_tokens, num_slots)

        num_positions = max(len(request.uniforms) for request in requests)
        self._state = calls.state(len(requests), num_positions, most_tokens, device)
        for row, (request, token) in enumerate(zip(requests, first_tokens, strict=True)):
            most = request.max_new_tokens
            self._state.begin(row, request.prompt, token, most, request.uniforms)
        self._set_warps()
        size = step.logits.shape[-1]
        return [
            row.take([0, token, 0], size)
            for row, token in zip(self._rows, first_tokens, strict=True)
        ]

    def step(self) -> list[RowStep]:
        """Decide further tokens of all rows, at least one of each.

        Raises:
            NonFiniteError: logits that are no numbers. Caches hold them too: the loop ends, and its runners are closed.
        """
        self._settle()
        rows = self._rows
        calls = self._calls
        # K tokens for each row, or as many as it may still take before its last one. So the caches never hold more than
        # prompt, `max_new_tokens` and K.
        limits = [row.request.max_new_tokens - row.num_generated - 1 for row in rows]
        count = min(calls.num_draft_tokens, max(limits))
        if count > 0 and self._state.is_fixed:
            count = calls.num_draft_tokens
        lengths = [len(row.request.prompt) + row.num_generated - 1 for row in rows]
        state = self._state
        state.longest = max(lengths)

        proposal = None
        if count > 0:
            self._watch("drafting")
            proposal = calls.propose(state, count, [min(count, limit) for limit in limits])
        self._watch("forward")
        packed, step = calls.decide(state, proposal)
        self._watch("host")
        size = step.logits.shape[-1]
        row_steps = [
            row.take(numbers, size) for row, numbers in zip(rows, packed.tolist(), strict=False)
        ]

        num_tokens = sum(len(row_step.tokens) for row_step in row_steps)
        self.num_decided[calls.was_prepared] += num_tokens

        # Roll back: the token before the proposal stays, and so do those accepted. The next one is
        # not read yet.
        num_accepted = [row_step.num_accepted for row_step in row_steps]
        counts = [number + 1 for number in num_accepted]
        self._target.keep(counts)
        if isinstance(self._drafter, TensorDrafter):
            if proposal is not None:
                self._drafter.keep(counts)
        elif self._drafter is not None:
            tokens = [row_step.tokens for row_step in row_steps]
            self._drafter.observe(num_accepted, tokens, step)
        return row_steps

    def _settle(self) -> None:
        """Let the drafter read the prompts, and rows that have ended leave."""
        staying = [index for index, row in enumerate(self._rows) if not row.has_ended]
        begin_drafting = self._begin_drafting
        self._begin_drafting = None
        if begin_drafting is not None and staying:
            begin_drafting()
        if len(staying) == len(self._rows):
            return
        self._rows = [self._rows[index] for index in staying]
        self._state = self._state.select(staying)
        if staying:
            self._set_warps()
            self._target.select(staying)
            if self._drafter is not None:
                self._drafter.select(staying)

    def _set_warps(self) -> None:
        warps = [row.request.warp for row in self._rows]
        self._calls.warp.set_rows(warps, self._state.numbers.device)
