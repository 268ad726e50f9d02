"""Other rules of verification, with the argument of `verify`: one lossless, one lossy."""

from __future__ import annotations

import dataclasses

import torch

from harness.decoding.randomness import inverse_cdf
from harness.decoding.verify import Offer, Verdict, accepted_prefix, prefix_length


def verify_block(offer: Offer) -> Verdict:
    """Block verification, Sun et al. 2024 (arXiv:2403.10444, algorithm 2): lossless, and no rule
    keeps more tokens.

    A token's surplus (target above draft) makes up for the deficit of later ones. With p_0 = 1 and
    p_i = min(1, p_{i-1} target(x_i) / draft(x_i)), the prefix of i < K tokens passes with
    probability s_i / (s_i + 1 - p_i), where s_i is the mass of max(0, p_i target - draft) after it,
    and the whole block with p_K. The longest prefix that passes is kept, even if a shorter one did
    not. The token after it is drawn from that residual. Deterministic proposals are accepted as
    often as by `verify`. Lenience divides the ratios, and is lossy.
    """
    target_probability = offer.target_probability
    draft_probability = offer.draft_probability
    lengths = offer.lengths
    # Behind a row's own offer the draft probability may be zero.
    smallest = torch.finfo(torch.float32).tiny
    ratios = target_probability / (offer.lenience * draft_probability).clamp(min=smallest)
    products = [torch.ones_like(offer.next_uniforms[:, 0])]
    for ratio in ratios.unbind(1):
        products.append((products[-1] * ratio).clamp(max=1))
    product = torch.stack(products, 1)
    scaled = product.unsqueeze(-1) * offer.target_probabilities
    if offer.draft_probabilities is None:
        surplus = product[:, :-1] * (1 - target_probability)
    else:
        surplus = (scaled[:, :-1] - offer.draft_probabilities).clamp(min=0).sum(-1)

    product = product[:, 1:]
    place = torch.arange(1, product.shape[1] + 1, device=product.device)
    # With p itself in place of s, the test of a whole block has the same form.
    mass = torch.cat([surplus[:, 1:], product[:, -1:]], 1)
    if lengths is not None:
        mass = torch.where(place == lengths.unsqueeze(1), product, mass)
    passed = offer.accept_uniforms * (mass + 1 - product) < mass
    if lengths is not None:
        passed = passed & (place <= lengths.unsqueeze(1))
    # A token is accepted if any prefix that ends with it or later passes.
    accepted = passed.flip(1).cumsum(1).flip(1) > 0
    decided = accepted_prefix(accepted, dataclasses.replace(offer, target_probabilities=scaled))
    return Verdict(*decided, target_probability, draft_probability)


def verify_typical(offer: Offer, *, epsilon: float = 0.09, delta: float = 0.3) -> Verdict:
    """Typical acceptance, Cai et al. 2024 (Medusa, arXiv:2401.10774, section 2.3.1): lossy unless
    decoding is greedy.

    Keeps draft tokens while target(x) > min(epsilon, delta exp(-entropy of the target)), by default
    with the values of Medusa's own code. The token after them is drawn from the target, as there.
    Uniforms for tests, and lenience, are ignored.
    """
    target = offer.target_probabilities
    target_probability = offer.target_probability
    entropy = torch.special.entr(target[:, :-1]).sum(-1)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    num_accepted = prefix_length(target_probability > threshold, offer.lengths)
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    next_token = inverse_cdf(target[rows, num_accepted], offer.next_uniforms[rows, num_accepted])
    return Verdict(num_accepted, next_token, target_probability, offer.draft_probability)
