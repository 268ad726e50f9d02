"""Verification: which draft tokens stand, and the token that follows them. One pure function.

The rule is that of Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023 (arXiv:2302.01318,
algorithm 2), which agree: accept draft token x with probability min(1, target(x) / draft(x)); at the first rejection
draw the recovered token from normalise(max(0, target - draft)) and stop; if all K are accepted draw the bonus token
from the target. Lenience l < 1 (Leviathan et al., appendix A.5) accepts with min(1, target(x) / (l draft(x))) and is
lossy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.decoding.randomness import inverse_cdf


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one verification, for B rows of K draft tokens.

    Attributes:
        num_accepted: [B] length of the accepted prefix, 0 to K.
        next_token: [B] the token after that prefix: bonus where the whole proposal was accepted, else recovered.
        target_probability: [B, K] of each draft token under the target.
        draft_probability: [B, K] of each draft token under the drafter.
    """

    num_accepted: Tensor
    next_token: Tensor
    target_probability: Tensor
    draft_probability: Tensor


def verify(
    target_probabilities: Tensor,
    draft_tokens: Tensor,
    draft_probabilities: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
    lenience: float = 1.0,
    limits: Tensor | None = None,
) -> Verdict:
    """Keep a prefix of the draft tokens and draw the token after it, so that the rows follow the target's distribution.

    Args:
        target_probabilities: [B, K + 1, V] float32, after each prefix of the draft tokens (the empty one first).
        draft_tokens: [B, K] with K >= 0.
        draft_probabilities: [B, K, V] float32, what each draft token was drawn from; warped as the target's.
        accept_uniforms: [B, K] in [0, 1), one for each test.
        next_uniforms: [B, K + 1] in [0, 1), one for each position the next token may fall on.
        lenience: in (0, 1]; 1 is exact.
        limits: [B] from 0 to K, how many draft tokens each row was proposed; what a batch's width adds behind them does
            not count. None for K in every row.
    """
    target_probability = probability_of(draft_tokens, target_probabilities)
    draft_probability = probability_of(draft_tokens, draft_probabilities)
    # u < target / draft, without the division: a uniform is below 1, so equal probabilities always accept.
    accepted = accept_uniforms * (lenience * draft_probability) < target_probability
    num_accepted, next_token = settle(accepted, target_probabilities, draft_probabilities, next_uniforms, limits)
    return Verdict(num_accepted, next_token, target_probability, draft_probability)


def probability_of(draft_tokens: Tensor, probabilities: Tensor) -> Tensor:
    """[B, K] of each draft token [B, K], where `probabilities` [B, K or more, V] begin."""
    return probabilities[:, : draft_tokens.shape[1]].gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1)


def settle(
    accepted: Tensor,
    target_probabilities: Tensor,
    draft_probabilities: Tensor,
    next_uniforms: Tensor,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The length [B] of each row's accepted prefix, and the token [B] that follows it.

    Args:
        accepted: [B, K] bool, what became of each test. The others are as in `verify`.
    """
    num_accepted = accepted.to(torch.int64).cumprod(-1).sum(-1)
    if limits is not None:
        num_accepted = torch.minimum(num_accepted, limits)

    rows = torch.arange(accepted.shape[0], device=accepted.device)
    target_next = target_probabilities[rows, num_accepted]
    # Behind the last proposal nothing was drafted: a draft distribution of zeros turns the residual into the target.
    draft_next = torch.nn.functional.pad(draft_probabilities, (0, 0, 0, 1))[rows, num_accepted]
    if limits is not None:
        draft_next = draft_next * (num_accepted < limits).unsqueeze(-1)
    residual = (target_next - draft_next).clamp(min=0)
    # A residual without mass means the two agree up to rounding; the target itself is then the limit.
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_next)
    return num_accepted, inverse_cdf(weights, next_uniforms[rows, num_accepted])
