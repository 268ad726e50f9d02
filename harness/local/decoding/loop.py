"""Regular and speculative decoding of a batch. The rows begin together. A row that has ended rests until all rows have
ended.

An iteration runs algorithm 1 of Leviathan et al. 2023 (algorithm 2 of Chen et al. 2023) in all rows together.
`docs/method.md` explains it for a single row.
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
    """A prompt to continue, with its decoding settings.

    Attributes:
        prompt: the token ids of the prompt, at least one.
        uniforms: [n, len(Purpose)] from `randomness.uniforms`, on the target's device. n is at least
            max_new_tokens + 1 or, if every iteration takes new numbers (`redraw` of `Calls`),
            (max_new_tokens + 1) (K + 1).
        warp: how logits become probabilities.
        max_new_tokens: the row ends when it has this many new tokens, if not before.
        stop_tokens: the row ends after the first of these tokens.
    """

    prompt: Sequence[int]
    uniforms: Tensor
    warp: Warp
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()


def size_of(requests: Sequence[RowRequest]) -> BatchSize:
    """Return the size of a batch of these requests."""
    return BatchSize(
        num_rows=len(requests),
        num_positions=max(len(request.uniforms) for request in requests),
        most_tokens=max(len(request.prompt) + request.max_new_tokens for request in requests),
    )


@dataclass
class BatchRow:
    """One sequence of a batch.

    Attributes:
        number: the index of the row in the batch, from 0.
        request: the request of the row; the first request of the batch if the row only fills the batch up.
        num_generated: the number of new tokens so far.
        has_ended: whether the row has ended; True if it only fills the batch up.
    """

    number: int
    request: RowRequest
    num_generated: int = 0
    has_ended: bool = False

    @property
    def length(self) -> int | None:
        """The number of tokens that the target has read: all of the row's tokens but the last. None if it has ended."""
        return None if self.has_ended else len(self.request.prompt) + self.num_generated - 1

    @property
    def limit(self) -> int:
        """The largest number of draft tokens that the row can be offered: one less than it lacks, because its last
        token is always decided by the target. 0 if the row has ended.
        """
        return 0 if self.has_ended else self.request.max_new_tokens - self.num_generated - 1

    def take(self, numbers: Sequence[float], vocabulary_size: int) -> RowStep:
        """Append the tokens that were decided, up to the end of the row. A row that has ended gains none.

        Args:
            numbers: this row of `Decided.packed`.
            vocabulary_size: V. (A next token of V or more means that its logits were nan.)

        Raises:
            NonFiniteError: a model gave nan for a token of this iteration.
        """
        if self.has_ended:
            return RowStep(self.number, [])
        # K, the number of draft tokens that the pass verified. A row is 3 + 3 K numbers long.
        count = (len(numbers) - 3) // 3
        num_accepted, next_token, num_offered = map(int, numbers[:3])
        proposed = list(map(int, numbers[3 : 3 + num_offered]))
        target = numbers[3 + count :][:num_offered]
        draft = numbers[3 + 2 * count :][:num_offered]
        # All offered tokens are checked, not only those up to the first rejection: a rule may accept a token whatever
        # its probability is (`AcceptByCoin`), so that a nan need not cause a rejection.
        for role, probabilities in (("model", target), ("draft", draft)):
            for position, probability in enumerate(probabilities):
                if math.isnan(probability):
                    raise NonFiniteError(role, self.num_generated + position, self.number)
        # If weights are nan, `inverse_cdf` returns V, which is not a token of the vocabulary.
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
        if not finish_reason and self.num_generated >= self.request.max_new_tokens:
            finish_reason = "length"
        self.has_ended = finish_reason is not None
        rejection = None
        if num_accepted < num_offered:
            rejection = target[num_accepted], draft[num_accepted]
        return RowStep(self.number, tokens, proposed, num_accepted, rejection, finish_reason)


@dataclass(frozen=True, slots=True)
class RowStep:
    """The result of an iteration for one row.

    Attributes:
        row: the index of the row's request in the batch, from 0.
        tokens: the tokens that the row gained, cut after a stop token or at max_new_tokens. At least one; empty if the
            row had ended before.
        proposed: the draft tokens that the row was offered; empty in regular decoding.
        num_accepted: how many tokens of `proposed` were accepted, including tokens after the end of the row. (`outcome`
            counts only up to the end of the row.)
        rejection: the probability of the first rejected token under the target, and its probability under the drafter.
            None if no token was rejected. Not compared by `==`, because it is rounded.
        finish_reason: the reason why the row ends with this step; None if it goes on, or if the generator does not
            report the reason (`engine.huggingface`).
    """

    row: int
    tokens: list[int]
    proposed: list[int] = field(default_factory=list)
    num_accepted: int = 0
    rejection: tuple[float, float] | None = field(default=None, compare=False)
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def origins(self) -> list[Origin]:
        """The origin of each token of `tokens`."""
        return origins(len(self.proposed), self.num_accepted, len(self.tokens))

    @property
    def outcome(self) -> tuple[int, int]:
        """The number of proposed tokens and the number of accepted tokens.

        If an accepted token ends the row, both count only the tokens before it.

        The last token of a row always counts as decided by the target. For example, five of eight proposed tokens are
        accepted, and the third is a stop token. Then the row gains three tokens, and the outcome is (2, 2). So, as in
        an iteration that ends at the length limit, the iteration yields one token more than it accepts.
        """
        num_tokens = len(self.tokens)
        if num_tokens > self.num_accepted:
            return len(self.proposed), self.num_accepted
        return num_tokens - 1, num_tokens - 1


# A function that is called with the name of each phase when it begins; the device is not synchronised first. The
# phases are `prompts` once, and in every iteration `drafting` (if tokens may be proposed), `forward`, and `host` after
# the calls.
Watch = Callable[[str], None]


def unwatched(phase: str) -> None:
    """Do nothing: the `Watch` of a loop that is not timed."""


class Loop:
    """Decodes the rows of a batch together. Call `start` once, then `step` while `num_running` is above 0.

    Args:
        calls: the two calls of an iteration. Loops with the same calls must not run at the same time.
        watch: called when a phase begins.

    Attributes:
        num_decided: the number of tokens that iterations have decided so far, by prepared calls (key True) and by plain
            calls (key False). The first token of each row is not counted.
    """

    def __init__(self, calls: Calls, watch: Watch = unwatched) -> None:
        self._calls = calls
        self._watch = watch
        self._rows: list[BatchRow] = []
        self.num_decided: Counter[bool] = Counter()
        # A call of the drafter's `start`, which the first `step` makes. Until then, only the target has read the
        # prompts.
        self._begin_drafting: Callable[[], None] | None = None

    @property
    def num_running(self) -> int:
        """The number of rows that have not ended."""
        return sum(not row.has_ended for row in self._rows)

    def start(self, requests: Sequence[RowRequest], *, alone: bool = False) -> list[RowStep]:
        """Begin a batch of requests: read their prompts, and decide their first tokens.

        Returns one step per request, in the order of the requests.

        Args:
            alone: whether each prompt is read by itself, as for `Runner.start`.

        Raises:
            NonFiniteError: as from `step`.
        """
        self._watch("prompts")
        calls = self._calls
        device = requests[0].uniforms.device
        rows = calls.rows_for(size_of(requests), device)
        self._state = rows
        self._rows = [BatchRow(number, request) for number, request in enumerate(requests)]
        # A prepared state may have more rows than there are requests.
        for number in range(len(requests), rows.num_rows):
            self._rows.append(BatchRow(number, requests[0], has_ended=True))
        prompts = [row.request.prompt for row in self._rows]
        step = calls.target.start(prompts, rows.num_slots, alone=alone)

        calls.warp.set_rows([request.warp for request in requests], device)
        uniforms = torch.stack([row.request.uniforms[:1, Purpose.TARGET] for row in self._rows])
        first_tokens = inverse_cdf(calls.warp(step.logits), uniforms).flatten().tolist()
        if calls.drafter is not None:
            # The drafter reads the prompts only in the first `step`, so that the first tokens arrive earlier.
            self._begin_drafting = functools.partial(
                calls.drafter.start, prompts, first_tokens, step
            )
            if isinstance(calls.drafter, TensorDrafter):
                calls.drafter.make_room(rows.num_rows, calls.num_draft_tokens, rows.num_slots)

        # Rows that only fill the batch up have first tokens too, but no request: they stay at rest.
        for row, (request, token) in enumerate(zip(requests, first_tokens, strict=False)):
            rows.begin(row, request.prompt, token, request.max_new_tokens, request.uniforms)
        # These are rows of `Decided.packed` for iterations without a proposal.
        row_steps = self._taken([[0, token, 0] for token in first_tokens], step)
        return [row_step for row_step in row_steps if row_step.tokens]

    def step(self) -> list[RowStep]:
        """Decide at least one further token for every row that has not ended.

        Returns the steps of these rows only, in the order of the batch.

        Raises:
            NonFiniteError: a model gave logits that are nan or infinite. The caches may contain such numbers too, so
                the caller must drop this loop and close its runners.
        """
        if self._begin_drafting is not None:
            self._begin_drafting()
            self._begin_drafting = None
        calls, rows = self._calls, self._state
        # A row is offered K tokens or, near its end, fewer (`BatchRow.limit`). So the caches never contain more tokens
        # than the prompt, `max_new_tokens` and K together.
        limits = [row.limit for row in self._rows]
        count = min(calls.num_draft_tokens, max(limits))
        # The lengths are None if the calls are prepared (`RowState`).
        if rows.lengths is not None:
            rows.lengths = [row.length for row in self._rows]
        elif count > 0:
            # Prepared calls always draft K tokens.
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
        """Append the decided tokens to each row, and let rows that have ended rest. Returns one step per row.

        Args:
            numbers: for each row, its row of `Decided.packed`.
        """
        size = step.logits.shape[-1]
        row_steps = [
            row.take(of_row, size) for row, of_row in zip(self._rows, numbers, strict=True)
        ]
        ended = [row_step.row for row_step in row_steps if row_step.finish_reason is not None]
        if ended:
            self._state.rest(ended)
        return row_steps
