"""Regular and speculative decoding of a batch that rows join and leave between iterations.

An iteration is Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2, in every row at
once; `reference.py` has it for one row alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from harness.engines.arrivals import Origin, origins
from harness.local.decoding.inference import inference
from harness.local.decoding.protocols import Drafter, NonFiniteError, Runner, Step
from harness.local.decoding.randomness import Purpose, inverse_cdf
from harness.local.decoding.transfer import to_device
from harness.local.decoding.verify import Offer, Verdict, verify
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
        keeps_logits: whether iterations hand on the logits of its row.
    """

    prompt: Sequence[int]
    uniforms: Tensor
    warp: Warp
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    leave_after: int | None = None
    keeps_logits: bool = False


@dataclass
class BatchRow:
    """One sequence of a batch.

    Attributes:
        number: rows are numbered in the order in which they joined, from 0.
    """

    number: int
    request: RowRequest
    num_generated: int = 0
    num_iterations: int = 0
    has_ended: bool = False

    def take(self, tokens: list[int]) -> list[int]:
        """Add tokens that were decided, at least one; returns those up to the end of the row."""
        taken = tokens[: self.request.max_new_tokens - self.num_generated]
        for index, token in enumerate(taken):
            if token in self.request.stop_tokens:
                taken = taken[: index + 1]
                self.has_ended = True
                break
        self.num_generated += len(taken)
        most = self.request.leave_after or self.request.max_new_tokens
        if self.num_generated >= min(most, self.request.max_new_tokens):
            self.has_ended = True
        return taken


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row's part of an iteration.

    Attributes:
        row: its number: 0 for the first one that joined the batch, and so on.
        tokens: the tokens it gained, at least one, cut after a stop token or at the length limit.
        proposed: the draft tokens verified; empty in regular decoding.
        num_accepted: how many of `proposed` were accepted.
        rejection: the probability of the first rejected token under the target, and under the
            drafter; None if no token was rejected. Two steps that differ in its rounding are equal.
        error: logits of the row that are not finite; it has ended, and its tokens mean nothing.
    """

    row: int
    tokens: list[int]
    proposed: list[int] = field(default_factory=list)
    num_accepted: int = 0
    rejection: tuple[float, float] | None = field(default=None, compare=False)
    error: NonFiniteError | None = None

    @property
    def origins(self) -> list[Origin]:
        """Where each of `tokens` comes from."""
        return origins(len(self.proposed), self.num_accepted, len(self.tokens))


@dataclass(frozen=True, slots=True)
class Iteration:
    """The decisions of one iteration of a loop.

    Attributes:
        row_steps: of the rows that had not ended before it.
        logits: of rows whose request keeps them, by row number: the target's logits [n, V], on the device. logits[i]
            decided tokens[i]; n may be more than the number of tokens.
    """

    row_steps: list[RowStep]
    logits: Mapping[int, Tensor] = field(default_factory=dict)

    def sound(self) -> Iteration:
        """Return this iteration. Raises NonFiniteError if logits of any row are not finite."""
        for row_step in self.row_steps:
            if row_step.error is not None:
                raise row_step.error
        return self


class Decision(NamedTuple):
    """All that the host must know of what was decided in one row.

    Attributes:
        target_probabilities, draft_probabilities: of the draft tokens under the two models.
    """

    num_accepted: int
    next_token: int
    draft_tokens: Sequence[int] = ()
    target_probabilities: Sequence[float] = ()
    draft_probabilities: Sequence[float] = ()


class Loop:
    """Decodes the rows of some requests together: `add` them, and take a `step` while rows go on.

    Args:
        target: the runner of the model that decides.
        drafter: proposes tokens; None for regular decoding, one token per row and forward pass.
        num_draft_tokens: K; 0 is regular decoding.
        verification: the rule of acceptance, called where a row is offered a token.
        redraw: propose and accept with numbers that no other iteration takes, for a rule by which a
            rejection depends on later tokens (block verification): a position that is drafted again
            must not meet the numbers by which it was rejected, see `randomness`. With
            max_new_tokens=64 and K=4 a row's stream has 65 entries by position, then a block of 4 for
            each iteration.
        warp: the drafter's own, if rows with other settings may join: it then follows the batch.
    """

    def __init__(
        self,
        target: Runner,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
        *,
        verification: Callable[[Offer], Verdict] = verify,
        redraw: bool = False,
        warp: BatchWarp | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens if drafter is not None else 0
        self._verification = verification
        self._redraw = redraw
        self._warp = warp or BatchWarp()
        self._rows: list[BatchRow] = []
        # [B, 1], decided, but not read by the target yet.
        self._next_tokens = torch.empty(0, 1, dtype=torch.long)
        # [B, P, len(Purpose)]; a shorter request's numbers are filled up with zeros that decide nothing.
        self._uniforms = torch.empty(0)
        # The same for each purpose, [B, P].
        self._uniforms_for: Sequence[Tensor] = ()
        self._num_added = 0
        # Lets the drafter read prompts that only the target has read.
        self._begin_drafting: Callable[[], None] | None = None

    @property
    def num_running(self) -> int:
        """The rows that have not ended."""
        return sum(not row.has_ended for row in self._rows)

    @inference
    def add(self, requests: Sequence[RowRequest]) -> Iteration:
        """Read the prompts of requests, whose rows join behind the others, and decide their first
        tokens. Their rows are numbered on from the last that was added.
        """
        self._settle()
        added = [
            BatchRow(self._num_added + index, request) for index, request in enumerate(requests)
        ]
        self._num_added += len(added)
        prompts = [request.prompt for request in requests]
        step = self._target.add(prompts) if self._rows else self._target.start(prompts)

        streams = [request.uniforms for request in requests]
        warp = BatchWarp()
        warp.set_rows([request.warp for request in requests])
        uniforms = torch.stack([stream[:1, Purpose.TARGET] for stream in streams])
        drawn = inverse_cdf(warp(step.logits), uniforms)
        first_tokens = drawn.flatten().tolist()
        if self._drafter is not None:
            begin = self._drafter.add if self._rows else self._drafter.start
            # With the next call, because a reader waits for the first tokens.
            self._begin_drafting = functools.partial(begin, prompts, first_tokens, step)

        self._next_tokens = torch.cat([self._next_tokens, drawn]) if self._rows else drawn
        self._uniforms = pad_sequence([*self._uniforms, *streams], batch_first=True)
        self._uniforms_for = self._uniforms.unbind(-1)
        self._rows = [*self._rows, *added]
        self._warp.set_rows([row.request.warp for row in self._rows])
        step = Step(step.logits.unsqueeze(1))
        decisions = [Decision(0, token) for token in first_tokens]
        return self._apply_decisions(added, step, decisions, [0] * len(added))

    @inference
    def step(self) -> Iteration:
        """Decide further tokens of all rows, at least one of each."""
        self._settle()
        rows = self._rows
        # Draft: K tokens for each row, or as many as it may still take before its last one. Each row
        # has its own limit, whatever the others need: an answer must not depend on its batch. So the
        # cache never holds more than prompt and `max_new_tokens`.
        most = self._num_draft_tokens
        limits = [min(most, row.request.max_new_tokens - row.num_generated - 1) for row in rows]
        lengths = [0] * len(rows)
        width = max(limits)
        positions = [row.num_generated for row in rows]
        drafting = positions
        if self._redraw:
            # Behind those by position, the numbers that this iteration alone takes.
            drafting = [row.request.max_new_tokens + 1 + row.num_iterations * most for row in rows]
        if self._drafter is not None and width > 0:
            proposal = self._drafter.propose(
                width, self._uniforms_from(drafting, width, Purpose.DRAFT)
            )
            offered = proposal.lengths
            if offered is None:
                offered = [proposal.tokens.shape[1]] * len(rows)
            lengths = [min(limit, count) for limit, count in zip(limits, offered, strict=True)]
            width = max(lengths)

        # Verify: one pass of the target gives the probabilities after each token.
        next_uniforms = self._uniforms_from(positions, width + 1, Purpose.TARGET)
        if width:
            draft_tokens = proposal.tokens[:, :width]
            draft_probabilities = proposal.probabilities
            if draft_probabilities is not None:
                draft_probabilities = draft_probabilities[:, :width]
            accept_uniforms = self._uniforms_from(drafting, width, Purpose.ACCEPT)

            def judge(logits: Tensor) -> Verdict:
                return self._verification(
                    Offer(
                        target_probabilities=self._warp(logits),
                        draft_tokens=draft_tokens,
                        draft_probabilities=draft_probabilities,
                        accept_uniforms=accept_uniforms,
                        next_uniforms=next_uniforms,
                        lengths=to_device(lengths, logits.device),
                    )
                )

            tokens = torch.cat([self._next_tokens, draft_tokens], dim=1)
            step, verdict = self._target.decide(tokens, judge)
            self._next_tokens = verdict.next_token.unsqueeze(1)
            decisions = _read(verdict, draft_tokens)
        else:
            # No row is offered a token: as in regular decoding, the target draws the next one.
            def draw(logits: Tensor) -> Tensor:
                return inverse_cdf(self._warp(logits[:, -1]), next_uniforms)

            step, self._next_tokens = self._target.decide(self._next_tokens, draw)
            decisions = [Decision(0, token) for token in self._next_tokens.flatten().tolist()]

        iteration = self._apply_decisions(rows, step, decisions, lengths)

        # Roll back: the token before the proposal stays, and so do those accepted. The next one is
        # not read yet.
        num_accepted = [row_step.num_accepted for row_step in iteration.row_steps]
        self._target.keep([count + 1 for count in num_accepted])
        if self._drafter is not None:
            self._drafter.observe(
                num_accepted, [row_step.tokens for row_step in iteration.row_steps], step
            )
        for row in rows:
            row.num_iterations += 1
        return iteration

    def drop(self, numbers: Collection[int]) -> None:
        """End the rows with these numbers, those of them that are in the batch, even if their
        requests go on.
        """
        for row in self._rows:
            if row.number in numbers:
                row.has_ended = True

    def _settle(self) -> None:
        """Let the drafter read the prompts that joined, and rows that have ended leave."""
        staying = [index for index, row in enumerate(self._rows) if not row.has_ended]
        begin_drafting = self._begin_drafting
        self._begin_drafting = None
        if begin_drafting is not None and staying:
            begin_drafting()
        if len(staying) == len(self._rows):
            return
        self._rows = [self._rows[index] for index in staying]
        index = to_device(staying, self._uniforms.device)
        self._next_tokens = self._next_tokens[index]
        self._uniforms = self._uniforms[index]
        self._uniforms_for = self._uniforms.unbind(-1)
        if staying:
            self._warp.set_rows([row.request.warp for row in self._rows])
            self._target.select(staying)
            if self._drafter is not None:
                self._drafter.select(staying)

    def _apply_decisions(
        self,
        rows: Sequence[BatchRow],
        step: Step,
        decisions: Sequence[Decision],
        lengths: Sequence[int],
    ) -> Iteration:
        """Give the rows their tokens. A row whose logits are not finite ends alone.

        Args:
            lengths: how many draft tokens each row was offered.
        """
        width = max(lengths)
        vocabulary_size = step.logits.shape[-1]
        row_steps: list[RowStep] = []
        kept_logits: dict[int, Tensor] = {}
        for index, (row, decision) in enumerate(zip(rows, decisions, strict=True)):
            # All that was offered must be finite, not only what was accepted: a rule may accept a
            # token whatever the target's probability of it is (`AcceptByCoin`). The padding behind
            # a shorter row's tokens counts, too.
            error = None
            position = row.num_generated
            num_finite = _num_finite(decision.target_probabilities)
            num_finite_drafted = _num_finite(decision.draft_probabilities)
            if num_finite < width:
                error = NonFiniteError("model", position + num_finite)
            elif num_finite_drafted < width:
                error = NonFiniteError("draft", position + num_finite_drafted)
            # `inverse_cdf` draws a token beyond the vocabulary from nan.
            elif decision.next_token >= vocabulary_size:
                error = NonFiniteError("model", position + decision.num_accepted)
            if error is not None:
                # A token that exists: until it leaves, the row is handled as the others are.
                decision = Decision(0, 0)
                row.has_ended = True
                self._target.zero_nan()
                if self._drafter is not None:
                    self._drafter.zero_nan()
            num_accepted = decision.num_accepted
            tokens = row.take([*decision.draft_tokens[:num_accepted], decision.next_token])
            proposed = list(decision.draft_tokens[: lengths[index]])
            rejection = None
            if num_accepted < len(proposed):
                rejection = (
                    decision.target_probabilities[num_accepted],
                    decision.draft_probabilities[num_accepted],
                )
            row_steps.append(RowStep(row.number, tokens, proposed, num_accepted, rejection, error))
            if row.request.keeps_logits:
                kept_logits[row.number] = step.logits[index]
        return Iteration(row_steps, kept_logits)

    def _uniforms_from(self, starts: Sequence[int], count: int, purpose: Purpose) -> Tensor:
        """Return `count` random numbers per row, from each row's own start: [B, count]."""
        uniforms = self._uniforms_for[purpose]
        if len(set(starts)) == 1:
            return uniforms[:, starts[0] : starts[0] + count]
        device = uniforms.device
        index = to_device(starts, device).unsqueeze(1) + torch.arange(count, device=device)
        # A row near its end may not need them all; positions beyond the stream are never decided.
        return uniforms.gather(1, index.clamp(max=uniforms.shape[1] - 1))


def _read(verdict: Verdict, draft_tokens: Tensor) -> list[Decision]:
    """Copy what was decided in all rows to the host, packed into one tensor: one copy brings it all."""
    # Of numbers of both kinds torch makes float32, in which tokens are exact, up to 2**24.
    packed = torch.cat(
        [
            verdict.num_accepted.unsqueeze(1),
            verdict.next_token.unsqueeze(1),
            draft_tokens,
            verdict.target_probability,
            verdict.draft_probability,
        ],
        dim=1,
    )
    width = draft_tokens.shape[1]
    decisions = []
    for row in packed.tolist():
        num_accepted, next_token, *tokens = map(int, row[: width + 2])
        target_probabilities = row[width + 2 : 2 * width + 2]
        draft_probabilities = row[2 * width + 2 :]
        decisions.append(
            Decision(num_accepted, next_token, tokens, target_probabilities, draft_probabilities)
        )
    return decisions


def _num_finite(probabilities: Sequence[float]) -> int:
    """Count the probabilities before the first that is nan."""
    for index, probability in enumerate(probabilities):
        if math.isnan(probability):
            return index
    return len(probabilities)
