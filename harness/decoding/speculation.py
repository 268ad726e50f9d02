"""The steps of a speculative iteration: random numbers, a proposal, the target's verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from harness.decoding.batch import Progress, Rows
from harness.decoding.decisions import Figures, Judge
from harness.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.decoding.randomness import Purpose
from harness.decoding.transfer import Arriving, first_columns, to_device, to_host
from harness.decoding.turns import ChainTurn, undrafted_turn
from harness.decoding.verify import Offer, Verdict


class TurnUniforms(NamedTuple):
    """The random numbers of an iteration, in the order of `randomness.Purpose`."""

    draft: Tensor  # [B, K]
    accept: Tensor  # [B, K]
    target: Tensor  # [B, K + 1]


@dataclass(frozen=True)
class Speculation:
    """The steps of `loops.speculative`; its arguments are explained there.

    Where several processes decode together, `rows.agree` gives all of them the first one's tokens.
    """

    target: Runner
    drafter: Drafter
    rows: Rows
    lenience: float
    verification: Callable[[Offer], Verdict]
    redraw: bool
    most_draft_tokens: int

    def limits(self, num_draft_tokens: int, progress: Progress) -> list[int]:
        """Return how many tokens to draft for each row: no more than it may still take.

        So the cache never holds more than prompt and `max_new_tokens`.
        """
        members = self.rows.members
        # Numbers are still on the device only while the loop works ahead, far from each row's end.
        if isinstance(progress.num_generated, Arriving):
            return [num_draft_tokens] * len(members)
        # The last token of a row is the next token of a verdict, so one fewer needs to be drafted
        # than is missing. Each row has its own limit, however many tokens the others need: an
        # answer must not depend on its batch.
        return [
            min(num_draft_tokens, row.request.max_new_tokens - count - 1)
            for row, count in zip(members, progress.num_generated, strict=True)
        ]

    def uniforms(self, limits: Sequence[int], progress: Progress) -> TurnUniforms:
        """Return the random numbers of the rows' next positions.

        With `redraw`, drafting and accepting take numbers that no other iteration takes. Without
        it, a position keeps its numbers until its token is decided.
        """
        rows = self.rows
        most = max(limits)
        # [B, most + 1] for each purpose.
        draft, accept, target = rows.uniforms_from(progress.num_generated, most + 1).unbind(-1)
        if self.redraw and most:
            unused = rows.uniforms_of_iteration(
                progress.num_iterations, most, self.most_draft_tokens
            )
            draft, accept = unused[..., Purpose.DRAFT], unused[..., Purpose.ACCEPT]
        return TurnUniforms(first_columns(draft, most), first_columns(accept, most), target)

    def propose(self, limits: Sequence[int], uniforms: Tensor) -> Proposal:
        """Ask the drafter -> a proposal whose `lengths` say how many tokens each row is offered: no
        more than its limit. The tokens have no column beyond the longest.
        """
        rows = self.rows
        proposal = self.drafter.propose(max(limits), uniforms)
        offered = [proposal.tokens.shape[1]] * len(limits)
        if proposal.lengths is not None:
            offered = rows.agree(torch.tensor(proposal.lengths)).tolist()
        lengths = [min(pair) for pair in zip(limits, offered, strict=True)]
        width = max(lengths)
        probabilities = proposal.probabilities
        if probabilities is not None:
            probabilities = first_columns(probabilities, width)
        return Proposal(rows.agree(first_columns(proposal.tokens, width)), probabilities, lengths)

    def verify(
        self,
        proposal: Proposal,
        uniforms: TurnUniforms,
        limits: Sequence[int],
        progress: Progress,
    ) -> ChainTurn:
        """Queue the target's forward pass over the last token of each row and the proposal, and its
        verdict.
        """
        rows = self.rows
        lengths = proposal.lengths
        assert lengths is not None  # `propose` gives them
        width = max(lengths)
        if width == 0:
            return undrafted_turn(self.target, rows, limits, progress)
        inputs = [
            proposal.tokens,
            first_columns(uniforms.accept, width),
            first_columns(uniforms.target, width + 1),
        ]
        if proposal.probabilities is not None:
            inputs.append(proposal.probabilities)
        is_ragged = min(lengths) < width
        if is_ragged:
            inputs.append(to_device(lengths, proposal.tokens.device))
        judge = Judge(
            rows.warp.current,
            self.verification,
            self.lenience,
            is_deterministic=proposal.probabilities is None,
            is_ragged=is_ragged,
        )
        last_tokens = to_device(progress.next_tokens, proposal.tokens.device).unsqueeze(1)
        tokens = torch.cat([last_tokens, proposal.tokens], dim=1)
        step, decided = self.target.decide(tokens, judge, *inputs)
        return self._turn(step, limits, lengths, decided)

    def _turn(
        self,
        step: Step,
        limits: Sequence[int],
        lengths: Sequence[int],
        decided: Sequence[Tensor],
    ) -> ChainTurn:
        """Return the turn in which a `Judge` decided these outputs."""
        packed, target_probability, draft_probability = decided
        packed = self.rows.agree(packed)
        # On the device: each figure is the column of all rows.
        columns = Figures.unpack(packed.unbind(1))
        verdict = Verdict(
            columns.num_accepted, columns.next_token, target_probability, draft_probability
        )
        read_packed = to_host(packed)

        # On the host, once it asks: the figures of each row.
        def read_figures() -> list[Figures[int]]:
            return [Figures.unpack(row) for row in read_packed()]

        return ChainTurn(
            step=step,
            limits=limits,
            lengths=lengths,
            next_tokens=verdict.next_token,
            read_figures=read_figures,
            verdict=verdict,
        )
