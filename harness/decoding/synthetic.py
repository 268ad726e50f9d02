"""A verdict by coin: what would a pair give if its draft agreed this often? Not a rule of decoding, but a question."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.decoding.randomness import inverse_cdf
from harness.decoding.verify import Verdict


def verify_by_coin(
    bias: float,
    target_probabilities: Tensor,
    draft_tokens: Tensor,
    draft_probabilities: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
    lenience: float = 1.0,
    limits: Tensor | None = None,
) -> Verdict:
    """Accept each draft token with probability `bias`, whatever the models say of it; then draw from the target.

    As much work as in `verify`, operation by operation, because times are what this is for. The output follows no
    model.

    Args:
        bias: in [0, 1]: the conditional acceptance rate that comes out.
        target_probabilities: [B, K + 1, V] and all others as in `verify`.
    """
    num_rows, num_draft_tokens = draft_tokens.shape
    index = draft_tokens.unsqueeze(-1)
    target_probability = target_probabilities[:, :num_draft_tokens].gather(-1, index).squeeze(-1)
    draft_probability = draft_probabilities.gather(-1, index).squeeze(-1)
    accepted = accept_uniforms < bias
    num_accepted = accepted.to(torch.int64).cumprod(-1).sum(-1)
    if limits is not None:
        num_accepted = torch.minimum(num_accepted, limits)

    rows = torch.arange(num_rows, device=draft_tokens.device)
    target_next = target_probabilities[rows, num_accepted]
    draft_next = torch.nn.functional.pad(draft_probabilities, (0, 0, 0, 1))[rows, num_accepted]
    if limits is not None:
        draft_next = draft_next * (num_accepted < limits).unsqueeze(-1)
    residual = (target_next - draft_next).clamp(min=0)
    # Never true: the residual has been made, and the target's own distribution is taken.
    weights = torch.where(residual.sum(-1, keepdim=True) < 0, residual, target_next)
    next_token = inverse_cdf(weights, next_uniforms[rows, num_accepted])
    return Verdict(num_accepted, next_token, target_probability, draft_probability)
