"""The steps of a speculative iteration over chains of tokens: a proposal, and the target's verdict.

`loops.speculative` calls them in this order. They queue work on the device; the `ChainTurn` that
`verify` returns reads what was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.local.decoding.batch import Progress, Rows, TurnUniforms
from harness.local.decoding.decisions import Figures, Judge
from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.local.decoding.transfer import to_device, to_host
from harness.local.decoding.turns import ChainTurn, undrafted_turn
from harness.local.decoding.verify import Offer, Verdict


@dataclass(frozen=True)
class Speculation:
    """The steps of `loops.speculative`; its arguments are explained there."""

    target: Runner
    drafter: Drafter
    rows: Rows
    lenience: float
    verification: Callable[[Offer], Verdict]

    def propose(self, limits: Sequence[int], uniforms: Tensor) -> Proposal:
        """Ask the drafter for as many tokens as the largest limit.

        The result's `lengths` say how many of them each row is offered, no more than its limit, and
        its tokens end with the longest offer: limits (4, 1) and a drafter that proposes (2, 3)
        tokens give the lengths (2, 1) and tokens [2, 2].
        """
        proposal = self.drafter.propose(max(limits), uniforms)
        offered = [proposal.tokens.shape[1]] * len(limits)
        if proposal.lengths is not None:
            offered = list(proposal.lengths)
        lengths = [min(limit, count) for limit, count in zip(limits, offered, strict=True)]
        width = max(lengths)
        probabilities = proposal.probabilities
        if probabilities is not None:
            probabilities = probabilities[:, :width]
        return Proposal(proposal.tokens[:, :width], probabilities, lengths)

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
            uniforms.accept[:, :width],
            uniforms.target[:, : width + 1],
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
        """Return the turn whose `Judge` decided these outputs, which are still on the device."""
        packed, target_probability, draft_probability = decided
        # The first two of the `Figures` of all rows.
        num_accepted, next_token = packed[:, 0], packed[:, 1]
        verdict = Verdict(num_accepted, next_token, target_probability, draft_probability)
        read_packed = to_host(packed)

        # Each row's figures on the host, when it asks for them.
        def read_figures() -> list[Figures]:
            return [Figures.unpack(row) for row in read_packed()]

        return ChainTurn(
            step=step,
            limits=limits,
            lengths=lengths,
            next_tokens=next_token,
            read_figures=read_figures,
            verdict=verdict,
        )
