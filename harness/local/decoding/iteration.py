"""An iteration of a batch, as two calls that work on the state of its rows: `propose`, and `decide`, which verifies the
proposal and advances the rows. Without a proposal, `decide` is a step of regular decoding.

Both calls are functions of tensors. On the host they read only `RowState.lengths`, if the state has them. So the same
code can run plainly, be compiled, or be captured in a CUDA graph. (A drafter on the host is the exception: its
`propose` is never compiled or captured.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.local.decoding.protocols import (
    Drafter,
    Proposal,
    Runner,
    Step,
    TensorDrafter,
)
from harness.local.decoding.randomness import Purpose, inverse_cdf
from harness.local.decoding.state import Column, RowState
from harness.local.decoding.transfer import to_device
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.decoding.warp import BatchWarp


class Decided(NamedTuple):
    """The decisions of the target.

    Attributes:
        packed: [B, 3 + 3 K] float32, everything that the host must know. It is a single tensor, so that the host waits
            for the device only once. Each row contains these numbers, in this order (how many, and their meaning):

                1    the number of accepted tokens
                1    the token after them; V if its logits are nan
                1    the number of offered tokens
                K    the draft tokens
                K    their probabilities under the target
                K    their probabilities under the drafter

            Here K is the number of draft tokens that the pass verified: 0 without a proposal, and at most
            `num_draft_tokens`. With K=2, if one token is accepted and token 7 follows it, a row is
            [1, 7, 2, x1, x2, target(x1), target(x2), draft(x1), draft(x2)]. Without a proposal it is [0, 7, 0]. Token
            ids up to 2**24 are exact in float32.
        step: the outputs of the target's pass: logits [B, 1 + K, V], with the same K.
    """

    packed: Tensor
    step: Step


class BatchSize(NamedTuple):
    """The size of a batch.

    Attributes:
        num_rows: B.
        num_positions: the largest number of random numbers that a row has for each purpose.
        most_tokens: the largest number of tokens that a row can have, prompt included.
    """

    num_rows: int
    num_positions: int
    most_tokens: int

    def num_slots(self, num_draft_tokens: int) -> int:
        """Return how many slots a row needs in a cache: one for each of its tokens, K for draft tokens, and one more,
        because a draft model's pass over two tokens may begin at the last token of the longest row.
        """
        return self.most_tokens + num_draft_tokens + 1


class Calls:
    """The two calls of an arm's iterations. They work on the rows of any batch.

    Args:
        target: the runner of the target.
        drafter: proposes tokens; None for regular decoding, which yields one token per row and forward pass.
        num_draft_tokens: K; 0 for regular decoding.
        verification: the acceptance rule, called with every proposal.
        redraw: whether each iteration proposes and accepts with random numbers that no other iteration uses. This is
            needed for block verification, because there a rejection depends on later tokens: a position that is drafted
            again must not use the random numbers with which it was rejected (see `randomness`). With max_new_tokens=64
            and K=4, a row's stream then has 65 entries by position, followed by 4 entries for each iteration.
        warp: the `BatchWarp` of the rows, which the loop sets for each batch. It must be the object that the drafter
            uses, so that the drafter draws with the same warps. If None, a new one is made for the target.

    Attributes:
        was_prepared: whether the last decision was made by a prepared call.
    """

    was_prepared: bool = False

    def __init__(
        self,
        target: Runner,
        drafter: Drafter | TensorDrafter | None = None,
        num_draft_tokens: int = 0,
        *,
        verification: Callable[[Offer], Verdict] = verify,
        redraw: bool = False,
        warp: BatchWarp | None = None,
    ) -> None:
        self.target = target
        # K = 0 means regular decoding. The drafter is then dropped, so that it need not read the prompts.
        self.drafter = drafter if num_draft_tokens else None
        self.num_draft_tokens = num_draft_tokens if drafter is not None else 0
        self.warp = warp or BatchWarp()
        self.judge = Judge(self.warp, verification, num_draft_tokens if redraw else 0)

    def rows_for(self, batch: BatchSize, device: torch.device) -> RowState:
        """Return a state for a batch, in which all rows rest. It has at least as many rows as the batch."""
        count = self.num_draft_tokens
        num_slots = batch.num_slots(count)
        rows = RowState.resting(batch.num_rows, batch.num_positions, count, device, num_slots)
        rows.lengths = [None] * batch.num_rows
        return rows

    def propose(self, rows: RowState, count: int, limits: Sequence[int]) -> Proposal | None:
        """Propose up to `count` >= 1 tokens for each row. Returns None if a drafter on the host proposes no token for
        any row.

        Args:
            limits: the largest number of tokens that each row can be offered. Only proposals of drafters on the host
                are cut to these limits here. For other proposals, `decide` computes the limits from the state.
        """
        drafter = self.drafter
        assert drafter is not None
        if isinstance(drafter, TensorDrafter):
            return drafted(drafter, rows, self.drafting_uniforms(rows, count))
        uniforms = self.drafting_uniforms(rows, count if drafter.draws else 0)
        tokens, probabilities, proposed = drafter.propose(count, uniforms)
        if proposed is None:
            # Each row has a proposal of the full width.
            proposed = [tokens.shape[1]] * rows.num_rows
        lengths = [min(limit, int(length)) for limit, length in zip(limits, proposed, strict=True)]
        # The longest proposal decides how many tokens the target verifies in every row.
        width = max(lengths)
        if width == 0:
            return None
        if rows.lengths is None:
            # Lengths are unknown only to the rows of a prepared call. It always verifies K tokens, so the proposal is
            # padded.
            width = count
        # Fit the tokens to the width. The number is negative if the drafter proposes more tokens than any row can take:
        # then `pad` removes the last ones.
        num_missing = width - tokens.shape[1]
        tokens = pad(tokens, (0, num_missing))
        if probabilities is not None:
            probabilities = pad(probabilities, (0, 0, 0, num_missing))
        return Proposal(tokens, probabilities, to_device(lengths, tokens.device))

    def decide(self, rows: RowState, proposal: Proposal | None) -> Decided:
        """Run one pass of the target, and verify the proposal with its logits. Without a proposal, draw one token for
        each row. The state of the rows is advanced by the decided tokens.
        """
        tokens = rows.last
        if proposal is not None:
            tokens = torch.cat([tokens, proposal.tokens], 1)
        step = self.target.extend(tokens, rows.starts())
        packed = self.judged(rows, step.logits, proposal)
        if isinstance(self.drafter, TensorDrafter) and step.hidden is not None:
            self.drafter.learn(step.hidden)
        return Decided(packed, step)

    def drafting_uniforms(self, rows: RowState, count: int) -> Tensor:
        """Return the random numbers [B, count] with which an iteration drafts."""
        return rows.random(Purpose.DRAFT, self.judge.drafting_starts(rows), count)

    def judged(self, rows: RowState, logits: Tensor, proposal: Proposal | None) -> Tensor:
        """Decide with the target's logits [B, 1 + K, V], and advance the rows. Returns `Decided.packed`."""
        return self.judge(rows, logits, *(proposal or ()))


@dataclass(frozen=True)
class Judge:
    """Decides with the target's logits: draws one token for each row, or verifies a proposal.

    Attributes:
        warp: the warp of the batch's rows.
        verification: the acceptance rule.
        num_redrawn: K if each iteration drafts and accepts with K random numbers of its own (`redraw` of `Calls`); 0 if
            it uses those of the row's position.
    """

    warp: BatchWarp
    verification: Callable[[Offer], Verdict]
    num_redrawn: int

    def __call__(self, rows: RowState, logits: Tensor, *fields: Any) -> Tensor:
        """Decide with logits [B, 1 + K, V] about a proposal, and advance the rows. Returns `Decided.packed`.

        Args:
            fields: the fields of the proposal, because a compiled call (`runners.compiled.Part`) takes tensors and
                None, and no `Proposal`; none without a proposal.
        """
        if fields:
            return self._verify(rows, logits, Proposal(*fields))
        drawn_by = rows.random(Purpose.TARGET, rows.numbers[Column.DECIDED], 1)
        next_token = inverse_cdf(self.warp(logits), drawn_by)
        # If logits are nan, `inverse_cdf` returns V. The state must not contain V, because a GPU would fail in the
        # model's embedding. The host still reads V from the result, and reports the nan.
        rows.advance(next_token.clamp(max=logits.shape[-1] - 1))
        # Add a 0 on each side of the token: no token was accepted, and none was offered.
        return pad(next_token.float(), (1, 1))

    def _verify(self, rows: RowState, logits: Tensor, proposal: Proposal) -> Tensor:
        """Verify a proposal with logits [B, 1 + K, V], and advance the rows. Returns `Decided.packed`."""
        tokens = proposal.tokens
        count = tokens.shape[1]
        # A row's last token is never drafted, so each row is offered at most as many tokens as it lacks minus 1. This
        # does not depend on the other rows, because an answer must not depend on its batch.
        offered = (rows.numbers[Column.MOST] - rows.numbers[Column.DECIDED] - 1).clamp(
            min=0, max=count
        )
        if proposal.lengths is not None:
            assert isinstance(proposal.lengths, Tensor)
            offered = torch.minimum(offered, proposal.lengths)
        offer = Offer(
            target_probabilities=self.warp(logits),
            draft_tokens=tokens,
            draft_probabilities=proposal.probabilities,
            accept_uniforms=rows.random(Purpose.ACCEPT, self.drafting_starts(rows), count),
            next_uniforms=rows.random(Purpose.TARGET, rows.numbers[Column.DECIDED], count + 1),
            lengths=offered,
        )
        num_accepted, next_token = self.verification(offer)
        counts = torch.stack([num_accepted, next_token, offered], 1)
        packed = torch.cat(
            [counts, tokens, offer.target_probability, offer.draft_probability], dim=1
        )
        # `packed` keeps V for nan logits, but the state must not contain it, as in `__call__`.
        next_token = next_token.clamp(max=logits.shape[-1] - 1).unsqueeze(1)
        decided = torch.cat([tokens, next_token], 1)
        rows.advance(decided.scatter(1, num_accepted.unsqueeze(1), next_token), num_accepted)
        return packed

    def drafting_starts(self, rows: RowState) -> Tensor:
        """Return the index [B] of the first random number with which an iteration drafts and accepts.

        It is the row's position or, with `redraw`, the beginning of the block that belongs to this iteration alone. The
        blocks come after the numbers that belong to positions.
        """
        if not self.num_redrawn:
            return rows.numbers[Column.DECIDED]
        return rows.numbers[Column.MOST] + 1 + rows.numbers[Column.ITERATIONS] * self.num_redrawn


def drafted(drafter: TensorDrafter, rows: RowState, uniforms: Tensor) -> Proposal:
    """Let a drafter propose tokens for these rows, with uniforms [B, K]. The drafter may be on another device than the
    rows; the returned proposal is on the rows' device.
    """
    device = rows.numbers.device
    there = drafter.device or device
    return moved(drafter.draft(rows.on(there), uniforms.to(there)), device)


def moved(proposal: Proposal, device: torch.device) -> Proposal:
    """Return the proposal with its tensors on `device`."""
    values: list[Any] = [
        value.to(device) if isinstance(value, Tensor) else value for value in proposal
    ]
    return Proposal(*values)
