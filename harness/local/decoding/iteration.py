"""An iteration of a batch as two calls over its state: `propose`, and `decide`, which verifies and moves the rows on.

Both are functions of tensors, and on the host they read nothing but `RowState.lengths`, if the state has them. So the
code that is compiled or captured is the code that runs plainly. Without a proposal, `decide` is a step of regular
decoding.
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
        packed: [B, 3 + 3 K] float32, everything that the host must know, in one tensor so that it waits once. Each row
            has the number of accepted tokens, the token after them (V if its logits are nan) and the number of offered
            tokens; then K draft tokens, their K probabilities under the target, and their K probabilities under the
            drafter. Token ids up to 2**24 are exact in float32. With K=2, one token accepted and then token 7, a row is
            [1, 7, 2, x1, x2, target(x1), target(x2), draft(x1), draft(x2)]. Without a proposal it is [0, 7, 0].
        step: the target's pass, logits [B, 1 + K, V].
    """

    packed: Tensor
    step: Step


class BatchSize(NamedTuple):
    """The size of a batch.

    Attributes:
        num_rows: B.
        num_positions: the most random numbers of a row for each purpose.
        most_tokens: the most tokens of a row, its prompt and new ones.
    """

    num_rows: int
    num_positions: int
    most_tokens: int

    def num_slots(self, num_draft_tokens: int) -> int:
        """Return how many slots a row needs in a cache, for K draft tokens. They include K draft tokens, and one more
        because a draft model's last pass, of two tokens, may begin at the last token of the longest row.
        """
        return self.most_tokens + num_draft_tokens + 1


class Calls:
    """The two calls of an arm's iterations, over the rows of any batch.

    Args:
        target: the runner of the model that decides.
        drafter: proposes tokens; None for regular decoding, which gives one token per row and forward pass.
        num_draft_tokens: K; 0 is regular decoding.
        verification: the rule of acceptance, called with every proposal.
        redraw: whether each iteration proposes and accepts with random numbers that no other iteration uses. Needed for
            a rule by which a rejection depends on later tokens (block verification): a position that is drafted again
            must not meet the numbers by which it was rejected, see `randomness`. With max_new_tokens=64 and K=4 a row's
            stream then has 65 entries by position, followed by a block of 4 for each iteration.
        warp: the `BatchWarp` that the loop sets for the rows of each batch; give the one that the drafter uses, so
            that the drafter follows it. None makes one for the target alone.

    Attributes:
        was_prepared: whether a prepared call made the last decision.
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
        # A drafter that will never be asked need not read the prompts.
        self.drafter = drafter if num_draft_tokens else None
        self.num_draft_tokens = num_draft_tokens if drafter is not None else 0
        self.warp = warp or BatchWarp()
        self.judge = Judge(self.warp, verification, num_draft_tokens if redraw else 0)

    def rows_for(self, batch: BatchSize, device: torch.device) -> RowState:
        """Return the state for a batch. It has at least the batch's number of rows, and all of them rest."""
        count = self.num_draft_tokens
        num_slots = batch.num_slots(count)
        rows = RowState.resting(batch.num_rows, batch.num_positions, count, device, num_slots)
        rows.lengths = [None] * batch.num_rows
        return rows

    def propose(self, rows: RowState, count: int, limits: Sequence[int]) -> Proposal | None:
        """Propose up to `count` >= 1 tokens for each row. Returns None if a drafter on the host offers no row a token.

        Args:
            limits: the most tokens that each row can be offered. Only the proposal of a drafter on the host is cut to
                them here: `decide` computes the limits from the state.
        """
        drafter = self.drafter
        assert drafter is not None
        if isinstance(drafter, TensorDrafter):
            return drafted(drafter, rows, self.drafting_uniforms(rows, count))
        uniforms = self.drafting_uniforms(rows, count if drafter.draws else 0)
        tokens, probabilities, offered = drafter.propose(count, uniforms)
        if offered is None:
            offered = [tokens.shape[1]] * rows.num_rows
        lengths = [min(limit, int(length)) for limit, length in zip(limits, offered, strict=True)]
        width = max(lengths)
        if width == 0:
            return None
        if rows.lengths is None:
            # A prepared call always judges K tokens.
            width = count
        num_missing = (
            width - tokens.shape[1]
        )  # below 0 where more are proposed than any row can take
        tokens = pad(tokens, (0, num_missing))
        if probabilities is not None:
            probabilities = pad(probabilities, (0, 0, 0, num_missing))
        return Proposal(tokens, probabilities, to_device(lengths, tokens.device))

    def decide(self, rows: RowState, proposal: Proposal | None) -> Decided:
        """Run one pass of the target, and verify the proposal by it. Without a proposal, draw one token of each row.
        The state of the rows moves on.
        """
        block = rows.last
        if proposal is not None:
            block = torch.cat([block, proposal.tokens], 1)
        step = self.target.extend(block, rows.starts())
        packed = self.judged(rows, step.logits, proposal)
        if isinstance(self.drafter, TensorDrafter) and step.hidden is not None:
            self.drafter.learn(step.hidden)
        return Decided(packed, step)

    def drafting_uniforms(self, rows: RowState, count: int) -> Tensor:
        """Return the random numbers [B, count] that an iteration drafts with."""
        return rows.random(Purpose.DRAFT, self.judge.drafting_places(rows), count)

    def judged(self, rows: RowState, logits: Tensor, proposal: Proposal | None) -> Tensor:
        """Decide by the target's logits [B, 1 + K, V], and move the rows on. Returns `Decided.packed`."""
        return self.judge(rows, logits, *(proposal or ()))


@dataclass(frozen=True)
class Judge:
    """Decides by the target's logits: draws one token of each row, or judges a proposal.

    Attributes:
        warp: the warp of the batch's rows.
        verification: the rule of acceptance.
        num_redrawn: how many random numbers each iteration has to itself for drafting, and as many for accepting; 0 if
            it uses those of the row's position.
    """

    warp: BatchWarp
    verification: Callable[[Offer], Verdict]
    num_redrawn: int

    def __call__(self, rows: RowState, logits: Tensor, *fields: Any) -> Tensor:
        """Decide by logits [B, 1 + K, V] about a proposal, given as its fields, and move the rows on. Without fields
        there is no proposal. Returns `Decided.packed`.
        """
        if fields:
            return self._verify(rows, logits, Proposal(*fields))
        drawn_by = rows.random(Purpose.TARGET, rows.numbers[Column.DECIDED], 1)
        next_token = inverse_cdf(self.warp(logits), drawn_by)
        # V, which `inverse_cdf` draws from nan, would make a GPU fail in the model's embedding.
        rows.advance(next_token.clamp(max=logits.shape[-1] - 1))
        # A 0 on each side of the token: none accepted, none offered.
        return pad(next_token.float(), (1, 1))

    def _verify(self, rows: RowState, logits: Tensor, proposal: Proposal) -> Tensor:
        """Verify a proposal by logits [B, 1 + K, V], and move the rows on. Returns `Decided.packed`."""
        tokens = proposal.tokens
        count = tokens.shape[1]
        # Each row is offered as many tokens as it can still take before its last one, whatever the other rows need: an
        # answer must not depend on its batch.
        offered = (rows.numbers[Column.MOST] - rows.numbers[Column.DECIDED] - 1).clamp(
            min=0, max=count
        )
        if proposal.lengths is not None:
            assert isinstance(proposal.lengths, Tensor)
            offered = torch.minimum(offered, proposal.lengths)
        accept_places = self.drafting_places(rows)
        offer = Offer(
            target_probabilities=self.warp(logits),
            draft_tokens=tokens,
            draft_probabilities=proposal.probabilities,
            accept_uniforms=rows.random(Purpose.ACCEPT, accept_places, count),
            next_uniforms=rows.random(Purpose.TARGET, rows.numbers[Column.DECIDED], count + 1),
            lengths=offered,
        )
        num_accepted, next_token = self.verification(offer)
        counts = torch.stack([num_accepted, next_token, offered], 1)
        packed = torch.cat(
            [counts, tokens, offer.target_probability, offer.draft_probability], dim=1
        )
        next_token = next_token.clamp(max=logits.shape[-1] - 1).unsqueeze(1)
        decided = torch.cat([tokens, next_token], 1)
        rows.advance(decided.scatter(1, num_accepted.unsqueeze(1), next_token), num_accepted)
        return packed

    def drafting_places(self, rows: RowState) -> Tensor:
        """Return the index [B] of the first random number that an iteration drafts and accepts with. It is the row's
        position. If each iteration has numbers to itself, these come after all numbers by position, in blocks.
        """
        if not self.num_redrawn:
            return rows.numbers[Column.DECIDED]
        return rows.numbers[Column.MOST] + 1 + rows.numbers[Column.ITERATIONS] * self.num_redrawn


def drafted(drafter: TensorDrafter, rows: RowState, uniforms: Tensor) -> Proposal:
    """Let a drafter, which may be on another device, propose tokens for these rows with uniforms [B, K]. The proposal
    is on the rows' device.
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
