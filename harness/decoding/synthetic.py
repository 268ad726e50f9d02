"""A verdict by coin: what would a pair give if its draft agreed this often? Not a rule of decoding, but a question."""

from __future__ import annotations

from torch import Tensor

from harness.decoding.verify import Verdict, probability_of, settle


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
    """Accept each draft token with probability `bias`, whatever the models say of it. The output follows no model.

    As much work as in `verify`, because times are what this is for.

    Args:
        bias: in [0, 1]: the conditional acceptance rate that comes out.
        target_probabilities: [B, K + 1, V] and all others as in `verify`.
    """
    num_accepted, next_token = settle(
        accept_uniforms < bias, target_probabilities, draft_probabilities, next_uniforms, limits
    )
    return Verdict(
        num_accepted,
        next_token,
        probability_of(draft_tokens, target_probabilities),
        probability_of(draft_tokens, draft_probabilities),
    )
