"""Verification: which draft tokens are kept, and the token that follows them. One pure function.

The rule is that of Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023
(arXiv:2302.01318, algorithm 2), which agree: accept draft token x with probability min(1, target(x)
/ draft(x)); at the first rejection draw the recovered token from normalise(max(0, target - draft))
and stop; if all are accepted draw the bonus token from the target. Lenience l < 1 (Leviathan et
al., appendix A.5) accepts with min(1, target(x) / (l draft(x))) and is lossy. A deterministic
drafter has draft(x) = 1 for its token: the residual is then the target without that token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.local.decoding.randomness import inverse_cdf


@dataclass(frozen=True, slots=True)
class Offer:
    """The input of a verification: K >= 0 draft tokens for each of B rows.

    Attributes:
        target_probabilities: [B, K + 1, V] float32, after each prefix of the draft tokens (the
            empty one first).
        draft_tokens: [B, K].
        draft_probabilities: [B, K, V] float32, what each draft token was drawn from, warped like
            the target's; None for a deterministic drafter.
        accept_uniforms: [B, K] in [0, 1), one for each test.
        next_uniforms: [B, K + 1] in [0, 1), one for each position the next token may have.
        lenience: in (0, 1]; 1 is exact.
        lengths: [B] from 0 to K, how many draft tokens each row was offered; the others only fill
            the batch up and do not count. None for K in every row.
    """

    target_probabilities: Tensor
    draft_tokens: Tensor
    draft_probabilities: Tensor | None
    accept_uniforms: Tensor
    next_uniforms: Tensor
    lenience: float = 1.0
    lengths: Tensor | None = None

    @property
    def target_probability(self) -> Tensor:
        """Each draft token's probability [B, K] under the target."""
        return self._chosen(self.target_probabilities)

    @property
    def draft_probability(self) -> Tensor:
        """Each draft token's probability [B, K] under the drafter; ones if it is deterministic."""
        if self.draft_probabilities is None:
            return torch.ones_like(self.draft_tokens, dtype=self.target_probabilities.dtype)
        return self._chosen(self.draft_probabilities)

    def _chosen(self, probabilities: Tensor) -> Tensor:
        # Positions behind the last draft token are left out.
        return probabilities.gather(-1, self.draft_tokens.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one verification, for B rows of K draft tokens.

    Attributes:
        num_accepted: [B] length of the accepted prefix, 0 to K.
        next_token: [B] the token after that prefix: bonus where the whole offer was accepted, else
            recovered.
        target_probability: [B, K], the probability of each draft token under the target.
        draft_probability: [B, K], the probability of each draft token under the drafter; ones if it
            is deterministic.
    """

    num_accepted: Tensor
    next_token: Tensor
    target_probability: Tensor
    draft_probability: Tensor

    def select(self, rows: Tensor, width: int) -> Verdict:
        """Return the verdict over these rows [n], and the first `width` draft tokens of each, where
        the others of the batch were offered more.
        """
        return Verdict(
            num_accepted=self.num_accepted[rows],
            next_token=self.next_token[rows],
            target_probability=self.target_probability[rows, :width],
            draft_probability=self.draft_probability[rows, :width],
        )


def verify(offer: Offer) -> Verdict:
    """Keep a prefix of the draft tokens and draw the token after it: the rows follow the target's
    distribution.
    """
    target_probability = offer.target_probability
    draft_probability = offer.draft_probability
    # u < target / draft, without the division: a uniform is below 1, so equal probabilities always
    # accept.
    accepted = offer.accept_uniforms * (offer.lenience * draft_probability) < target_probability
    return Verdict(*accepted_prefix(accepted, offer), target_probability, draft_probability)


def prefix_length(accepted: Tensor, lengths: Tensor | None) -> Tensor:
    """Count the tests [B, K] that pass before the first that fails, at most lengths [B]."""
    num_accepted = accepted.cumprod(-1, dtype=torch.int64).sum(-1)
    return num_accepted if lengths is None else torch.minimum(num_accepted, lengths)


def accepted_prefix(accepted: Tensor, offer: Offer) -> tuple[Tensor, Tensor]:
    """Return the length [B] of each row's accepted prefix, and the token [B] drawn after it.

    Args:
        accepted: [B, K] bool, the result of each test.
        offer: the target probabilities need not sum to one. Block verification scales those after
            the i-th token by p_i, and not the draft's, because the token that follows is drawn from
            max(0, p_i target - draft) (`rules`).
    """
    num_rows, num_draft_tokens = accepted.shape
    num_accepted = prefix_length(accepted, offer.lengths)
    rows = torch.arange(num_rows, device=accepted.device)
    weights = offer.target_probabilities[rows, num_accepted]
    if num_draft_tokens:
        rejected = num_accepted < (num_draft_tokens if offer.lengths is None else offer.lengths)
        # The index of the rejected token, if there is one.
        index = num_accepted.clamp(max=num_draft_tokens - 1)
        if offer.draft_probabilities is None:
            residual = weights.scatter(-1, offer.draft_tokens[rows, index].unsqueeze(-1), 0.0)
        else:
            residual = (weights - offer.draft_probabilities[rows, index]).clamp(min=0)
        # A residual without mass means that the two distributions agree up to rounding: draw from
        # the target itself.
        recovered = rejected & (residual.sum(-1) > 0)
        weights = torch.where(recovered.unsqueeze(-1), residual, weights)
    return num_accepted, inverse_cdf(weights, offer.next_uniforms[rows, num_accepted])
