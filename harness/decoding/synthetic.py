"""Verification by coin: how fast would a pair be if its draft agreed this often? The output follows no model."""

from __future__ import annotations

from torch import Tensor

from harness.decoding.verify import Verdict, accepted_prefix, probabilities_of


def verify_by_coin(
    bias: float,
    target_probabilities: Tensor,
    draft_tokens: Tensor,
    draft_probabilities: Tensor | None,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
    lenience: float = 1.0,
    lengths: Tensor | None = None,
) -> Verdict:
    """Accept each draft token with probability `bias` in [0, 1], which becomes the conditional acceptance rate.

    The other arguments are those of `verify`; `lenience` is ignored. As much work as in `verify`, to measure times.
    """
    num_accepted, next_token = accepted_prefix(
        accept_uniforms < bias, target_probabilities, draft_tokens, draft_probabilities, next_uniforms, lengths
    )
    return Verdict(num_accepted, next_token, *probabilities_of(draft_tokens, target_probabilities, draft_probabilities))
