"""Verification: which draft tokens are kept, and the token that follows them. One pure function.

The rule is that of Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023 (arXiv:2302.01318,
algorithm 2), which agree: accept draft token x with probability min(1, target(x) / draft(x)); at the first rejection
draw the recovered token from normalise(max(0, target - draft)) and stop; if all are accepted draw the bonus token from
the target. Lenience l < 1 (Leviathan et al., appendix A.5) accepts with min(1, target(x) / (l draft(x))) and is lossy.
A deterministic drafter has draft(x) = 1 for its token: the residual is then the target without that token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.decoding.randomness import inverse_cdf


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one verification, for B rows of K draft tokens."""

    num_accepted: Tensor  # [B] length of the accepted prefix, 0 to K
    next_token: Tensor  # [B] the token after that prefix: bonus where the whole offer was accepted, else recovered
    target_probability: Tensor  # [B, K] of each draft token under the target
    draft_probability: Tensor  # [B, K] of each draft token under the drafter; ones for a deterministic drafter


def verify(
    target_probabilities: Tensor,
    draft_tokens: Tensor,
    draft_probabilities: Tensor | None,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
    lenience: float = 1.0,
    lengths: Tensor | None = None,
) -> Verdict:
    """Keep a prefix of the draft tokens and draw the token after it, so that the rows follow the target's distribution.

    Args:
        target_probabilities: [B, K + 1, V] float32, after each prefix of the draft tokens (the empty one first).
        draft_tokens: [B, K] with K >= 0.
        draft_probabilities: [B, K, V] float32, what each draft token was drawn from, warped like the target's; None for
            a deterministic drafter.
        accept_uniforms: [B, K] in [0, 1), one for each test.
        next_uniforms: [B, K + 1] in [0, 1), one for each position the next token may have.
        lenience: in (0, 1]; 1 is exact.
        lengths: [B] from 0 to K, how many draft tokens each row was offered; the others only fill the batch up and do
            not count. None for K in every row.
    """
    target_probability, draft_probability = probabilities_of(draft_tokens, target_probabilities, draft_probabilities)
    # u < target / draft, without the division: a uniform is below 1, so equal probabilities always accept.
    accepted = accept_uniforms * (lenience * draft_probability) < target_probability
    num_accepted, next_token = accepted_prefix(
        accepted, target_probabilities, draft_tokens, draft_probabilities, next_uniforms, lengths
    )
    return Verdict(num_accepted, next_token, target_probability, draft_probability)


def probabilities_of(
    draft_tokens: Tensor, target_probabilities: Tensor, draft_probabilities: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each draft token's probability [B, K] under the target, and under the drafter; arguments as in `verify`."""
    index = draft_tokens.unsqueeze(-1)
    target_probability = target_probabilities[:, : draft_tokens.shape[1]].gather(-1, index).squeeze(-1)
    if draft_probabilities is None:
        return target_probability, torch.ones_like(target_probability)
    return target_probability, draft_probabilities.gather(-1, index).squeeze(-1)


def prefix_length(accepted: Tensor, lengths: Tensor | None) -> Tensor:
    """How many tests [B, K] in a row are passed before the first that is not, at most lengths [B]."""
    num_accepted = accepted.to(torch.int64).cumprod(-1).sum(-1)
    return num_accepted if lengths is None else torch.minimum(num_accepted, lengths)


def accepted_prefix(
    accepted: Tensor,
    target_probabilities: Tensor,
    draft_tokens: Tensor,
    draft_probabilities: Tensor | None,
    next_uniforms: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The length [B] of each row's accepted prefix, and the token [B] drawn after it.

    Args:
        accepted: [B, K] bool, the result of each test.
        target_probabilities: need not sum to one; their scale counts where draft probabilities are subtracted. The
            others are as in `verify`.
    """
    num_rows, num_draft_tokens = accepted.shape
    num_accepted = prefix_length(accepted, lengths)
    rows = torch.arange(num_rows, device=accepted.device)
    weights = target_probabilities[rows, num_accepted]
    if num_draft_tokens:
        rejected = num_accepted < (num_draft_tokens if lengths is None else lengths)
        place = num_accepted.clamp(max=num_draft_tokens - 1)  # of the rejected token, where there is one
        if draft_probabilities is None:
            residual = weights.scatter(-1, draft_tokens[rows, place].unsqueeze(-1), 0.0)
        else:
            residual = (weights - draft_probabilities[rows, place]).clamp(min=0)
        # A residual without mass means the two agree up to rounding; the target itself is then the limit.
        recovered = rejected & (residual.sum(-1) > 0)
        weights = torch.where(recovered.unsqueeze(-1), residual, weights)
    return num_accepted, inverse_cdf(weights, next_uniforms[rows, num_accepted])
