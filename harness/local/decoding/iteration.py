"""An iteration of a batch as two calls over its state: `propose`, and `decide`, which verifies and moves the rows on.

Both are functions of tensors that read nothing on the host, but for lengths where the state has them: what is compiled
or captured is what runs plainly. Without a proposal `decide` is a step of regular decoding.
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
        packed: [B, 3 + 3 K] float32, all that the host must know, in one tensor so that it waits once: the number of
            accepted tokens, the token that follows (V where the logits are nan), the number that was offered; then the
            draft tokens, and their probabilities under the target and under the drafter. Of tokens up to 2**24 float32
            is exact.
        step: the target's pass, logits [B, 1 + K, V].
    """

    packed: Tensor
    step: Step


class BatchSize(NamedTuple):
    """The size of a batch.

    Attributes:
        num_positions: random numbers of a row for each purpose.
        most_tokens: of a row, prompt and new ones.
    """

    num_rows: int
    num_positions: int
    most_tokens: int

    def num_slots(self, num_draft_tokens: int) -> int:
        """The slots of a row in a cache: a draft model's last pass, of two tokens, begins at the last token of the
        longest row.
        """
        return self.most_tokens + num_draft_tokens + 1


class Calls:
    """The two calls of an arm's iterations, over the rows of any batch.

    Args:
        target: the runner of the model that decides.
        drafter: proposes tokens; None for regular decoding, one token per row and forward pass.
        num_draft_tokens: K; 0 is regular decoding.
        verification: the rule of acceptance, called where a row may be offered a token.
        redraw: propose and accept with numbers that no other iteration takes, for a rule by which a
            rejection depends on later tokens (block verification): a position that is drafted again
            must not meet the numbers by which it was rejected, see `randomness`. With
            max_new_tokens=64 and K=4 a row's stream has 65 entries by position, then a block of 4 for
            each iteration.
        warp: the drafter's own, if it is to follow the rows of each batch.

    Attributes:
        was_prepared: whether a prepared call has decided last.
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
        # One that is never asked need not read the prompts.
        self.drafter = drafter if num_draft_tokens else None
        self.num_draft_tokens = num_draft_tokens if drafter is not None else 0
        self.warp = warp or BatchWarp()
        self.judge = Judge(self.warp, verification, num_draft_tokens if redraw else 0)

    def rows_for(self, batch: BatchSize, device: torch.device) -> RowState:
        """Return rows for a batch, as many or more, which rest."""
        count = self.num_draft_tokens
        num_slots = batch.num_slots(count)
        rows = RowState.resting(batch.num_rows, batch.num_positions, count, device, num_slots)
        rows.lengths = [None] * batch.num_rows
        return rows

    def propose(self, rows: RowState, count: int, limits: Sequence[int]) -> Proposal | None:
        """Propose up to `count` >= 1 tokens for each row; None where a drafter on the host offers no row any.

        Args:
            limits: how many each row can take. Only a drafter on the host is told; `decide` knows them.
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
            # A prepared call judges K tokens.
            width = count
        num_missing = (
            width - tokens.shape[1]
        )  # below 0 where more are proposed than any row can take
        tokens = pad(tokens, (0, num_missing))
        if probabilities is not None:
            probabilities = pad(probabilities, (0, 0, 0, num_missing))
        return Proposal(tokens, probabilities, to_device(lengths, tokens.device))

    def decide(self, rows: RowState, proposal: Proposal | None) -> Decided:
        """Verify a proposal by one pass of the target, or draw a token of each row without one. The rows move on."""
        block = rows.last
        if proposal is not None:
            block = torch.cat([block, proposal.tokens], 1)
        step = self.target.extend(block, rows.starts())
        packed = self.judged(rows, step.logits, proposal)
        if isinstance(self.drafter, TensorDrafter) and step.hidden is not None:
            self.drafter.learn(step.hidden)
        return Decided(packed, step)

    def drafting_uniforms(self, rows: RowState, count: int) -> Tensor:
        """Return the random numbers [B, count] with which an iteration drafts."""
        return rows.random(Purpose.DRAFT, self.judge.drafting_places(rows), count)

    def judged(self, rows: RowState, logits: Tensor, proposal: Proposal | None) -> Tensor:
        """Let the target decide by logits [B, 1 + K, V]; returns `Decided.packed`."""
        return self.judge(rows, logits, proposal)


@dataclass(frozen=True)
class Judge:
    """Decides by the target's logits: draws a token of each row, or judges a proposal.

    Attributes:
        warp: of the rows.
        verification: the rule of acceptance.
        num_redrawn: random numbers that an iteration takes for itself alone.
    """

    warp: BatchWarp
    verification: Callable[[Offer], Verdict]
    num_redrawn: int

    def __call__(self, rows: RowState, logits: Tensor, proposal: Proposal | None) -> Tensor:
        """Decide by logits [B, 1 + K, V], and let the rows move on; returns `Decided.packed`."""
        if proposal is not None:
            return self._verify(rows, logits, proposal)
        drawn_by = rows.random(Purpose.TARGET, rows.numbers[Column.DECIDED], 1)
        next_token = inverse_cdf(self.warp(logits), drawn_by)
        # A model that is fed the index V makes a GPU fail.
        rows.advance(next_token.clamp(max=logits.shape[-1] - 1))
        # Nothing was accepted, and nothing offered.
        return pad(next_token.float(), (1, 1))

    def _verify(self, rows: RowState, logits: Tensor, proposal: Proposal) -> Tensor:
        """Accept draft tokens of a proposal by logits [B, 1 + K, V], and let the rows move on; returns
        `Decided.packed`.
        """
        tokens = proposal.tokens
        count = tokens.shape[1]
        # As many as each row may still take before its last one, whatever the others need: an answer must not depend on
        # its batch.
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
        """Return where the random numbers begin [B] with which an iteration drafts and accepts: at the row's position,
        or behind those by position where each iteration takes its own.
        """
        if not self.num_redrawn:
            return rows.numbers[Column.DECIDED]
        return rows.numbers[Column.MOST] + 1 + rows.numbers[Column.ITERATIONS] * self.num_redrawn


def drafted(drafter: TensorDrafter, rows: RowState, uniforms: Tensor) -> Proposal:
    """Let a drafter, which may be on another device, propose tokens for these rows with uniforms [B, K]."""
    device = rows.numbers.device
    there = drafter.device or device
    return moved(drafter.draft(rows.on(there), uniforms.to(there)), device)


def moved(proposal: Proposal, device: torch.device) -> Proposal:
    """Return a proposal of tensors on a device."""
    values: list[Any] = [
        value.to(device) if isinstance(value, Tensor) else value for value in proposal
    ]
    return Proposal(*values)
