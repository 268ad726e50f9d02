"""Verification: which draft tokens are kept, and the token that follows them. Pure functions of an `Offer`.

`verify` has the rule of Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023
(arXiv:2302.01318, algorithm 2), which agree: accept draft token x with probability min(1, target(x)
/ draft(x)); at the first rejection draw the recovered token from normalise(max(0, target - draft))
and stop; if all are accepted draw the bonus token from the target. Lenience l < 1 (Leviathan et
al., appendix A.5) accepts with min(1, target(x) / (l draft(x))) and is lossy. A deterministic
drafter has draft(x) = 1 for its token: the residual is then the target without that token. Block verification, which is
lossless too, and a coin follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from harness.local.decoding.randomness import inverse_cdf


@dataclass(slots=True)
class Offer:
    """The input of a verification: K >= 1 draft tokens for each of B rows.

    Attributes:
        target_probabilities: [B, K + 1, V] float32, after each prefix of the draft tokens (the
            empty one first).
        draft_tokens: [B, K].
        draft_probabilities: [B, K, V] float32, what each draft token was drawn from, warped like
            the target's; None for a deterministic drafter.
        accept_uniforms: [B, K] in [0, 1), one for each test.
        next_uniforms: [B, K + 1] in [0, 1), one for each position the next token may have.
        lengths: [B] from 0 to K, how many draft tokens each row was offered; the others only fill
            the batch up and do not count.
        target_probability: [B, K], the probability of each draft token under the target.
        draft_probability: [B, K], the probability of each draft token under the drafter; ones if it is deterministic.
    """

    target_probabilities: Tensor
    draft_tokens: Tensor
    draft_probabilities: Tensor | None
    accept_uniforms: Tensor
    next_uniforms: Tensor
    lengths: Tensor
    target_probability: Tensor = field(init=False)
    draft_probability: Tensor = field(init=False)

    def __post_init__(self) -> None:
        tokens = self.draft_tokens.unsqueeze(-1)
        # `gather` leaves out the position behind the last draft token.
        self.target_probability = self.target_probabilities.gather(-1, tokens).squeeze(-1)
        if self.draft_probabilities is None:
            self.draft_probability = torch.ones_like(self.target_probability)
        else:
            self.draft_probability = self.draft_probabilities.gather(-1, tokens).squeeze(-1)


class Verdict(NamedTuple):
    """Outcome of one verification, for B rows.

    Attributes:
        num_accepted: [B] length of the accepted prefix, 0 to K.
        next_token: [B] the token after that prefix: bonus where the whole offer was accepted, else
            recovered.
    """

    num_accepted: Tensor
    next_token: Tensor


def verify(offer: Offer, *, lenience: float = 1.0) -> Verdict:
    """Keep a prefix of the draft tokens and draw the token after it: at lenience 1 the rows follow
    the target's distribution.
    """
    bound = offer.draft_probability
    if lenience != 1:
        bound = lenience * bound
    # u < target / draft, without the division: a uniform is below 1, so equal probabilities always
    # accept.
    return accepted_prefix(offer.accept_uniforms * bound < offer.target_probability, offer)


def accepted_prefix(accepted: Tensor, offer: Offer) -> Verdict:
    """Keep each row's accepted prefix, and draw the token after it.

    Args:
        accepted: [B, K] bool, the result of each test.
        offer: its target probabilities need not sum to one: `verify_block` scales them, and not the
            draft's, because the token that follows is drawn from max(0, scaled target - draft).
    """
    num_rows, num_draft_tokens = accepted.shape
    # The tests that pass before the first that fails.
    num_accepted = torch.minimum(accepted.cumprod(-1).sum(-1), offer.lengths)
    rows = torch.arange(num_rows, device=accepted.device)
    weights = offer.target_probabilities[rows, num_accepted]
    rejected = num_accepted < offer.lengths
    # The index of the rejected token, if there is one.
    index = num_accepted.clamp(max=num_draft_tokens - 1)
    if offer.draft_probabilities is None:
        residual = weights.scatter(-1, offer.draft_tokens[rows, index].unsqueeze(-1), 0.0)
    else:
        residual = (weights - offer.draft_probabilities[rows, index]).clamp_(min=0)
    # Without mass the two distributions agree up to rounding, or a coin rejected the only
    # possible token: draw from the target itself.
    recovered = rejected & (residual.sum(-1) > 0)
    weights = torch.where(recovered.unsqueeze(-1), residual, weights)
    next_token = inverse_cdf(weights, offer.next_uniforms[rows, num_accepted])
    return Verdict(num_accepted, next_token)


def verify_block(offer: Offer) -> Verdict:
    """Block verification, Sun et al. 2024 (arXiv:2403.10444, algorithm 2): lossless, and no rule
    keeps more tokens.

    A token's surplus (target above draft) makes up for the deficit of later ones. With reach_0 = 1 and
    reach_i = min(1, reach_{i-1} target(x_i) / draft(x_i)), the prefix of i < K tokens passes with
    probability mass_i / (mass_i + 1 - reach_i), where mass_i is that of max(0, reach_i target - draft)
    after it, and the whole block with reach_K. The longest prefix that passes is kept, even if a shorter one did
    not. The token after it is drawn from that residual. Deterministic proposals are accepted as
    often as by `verify`.
    """
    reach = _reach(offer.target_probability, offer.draft_probability)
    scaled_target = reach.unsqueeze(-1) * offer.target_probabilities
    if offer.draft_probabilities is None:
        # The draft has all its mass on its token.
        residual_mass = reach[:, :-1] * (1 - offer.target_probability)
    else:
        residual = (scaled_target[:, :-1] - offer.draft_probabilities).clamp(min=0)
        residual_mass = residual.sum(-1)
    passed = _passes(residual_mass, reach, offer)
    # A token is accepted if any prefix that ends with it or later passes.
    accepted = passed.flip(1).cumsum(1).flip(1) > 0
    return accepted_prefix(accepted, replace(offer, target_probabilities=scaled_target))


def _reach(target_probability: Tensor, draft_probability: Tensor) -> Tensor:
    """Return reach_0 to reach_K of each row [B, K + 1]."""
    # Behind a row's own offer the draft probability may be zero.
    smallest = torch.finfo(torch.float32).tiny
    ratios = target_probability / draft_probability.clamp(min=smallest)
    reach = ratios.new_ones(len(ratios))
    prefixes = [reach]
    for ratio in ratios.unbind(1):
        reach = (reach * ratio).clamp(max=1)
        prefixes.append(reach)
    return torch.stack(prefixes, 1)


def _passes(residual_mass: Tensor, reach: Tensor, offer: Offer) -> Tensor:
    """Return which prefixes of 1 to K tokens [B, K] pass, none longer than the row's own offer.

    Args:
        residual_mass: mass_0 to mass_(K - 1), [B, K].
        reach: reach_0 to reach_K, [B, K + 1].
    """
    reach = reach[:, 1:]
    # A whole block passes with its reach. With that in place of the mass its test is that of the others.
    mass = torch.cat([residual_mass[:, 1:], reach[:, -1:]], 1)
    lengths = offer.lengths.unsqueeze(1)
    prefix_lengths = torch.arange(1, reach.shape[1] + 1, device=reach.device)
    mass = torch.where(prefix_lengths == lengths, reach, mass)
    passed = offer.accept_uniforms * (mass + 1 - reach) < mass
    return passed & (prefix_lengths <= lengths)


@dataclass(frozen=True)
class AcceptByCoin:
    """Accepts the draft token at each position with the probability that `rates` have for it: how
    fast would a pair be if its draft agreed this often?

    Takes the place of `verify` where `decoding.synthetic_acceptance` is set. The output follows no
    model. The rates, in [0, 1], become the conditional acceptance rates by position; the last one holds
    for all later positions. Lenience is ignored. It does as much work as `verify`, so that times
    can be measured with it.
    """

    rates: tuple[float, ...]

    def __call__(self, offer: Offer) -> Verdict:
        uniforms = offer.accept_uniforms
        accepted = uniforms < self.rates[-1]
        num_draft_tokens = uniforms.shape[1]
        for place, rate in enumerate(self.rates[:-1][:num_draft_tokens]):
            accepted[:, place] = uniforms[:, place] < rate
        return accepted_prefix(accepted, offer)
