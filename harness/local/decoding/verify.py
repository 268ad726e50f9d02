"""Verification: decides which draft tokens are kept, and which token follows them. All rules are pure functions of an
`Offer`.

- `verify` is the rule on which Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023
  (arXiv:2302.01318, algorithm 2) agree. It accepts draft token x with probability min(1, target(x) / draft(x)). At the
  first rejection it draws the recovered token from normalise(max(0, target - draft)), and stops. If all tokens are
  accepted, it draws the bonus token from the target. It is lossless.
- `verify` with a lenience l < 1 (Leviathan et al., appendix A.5) accepts with the larger probability
  min(1, target(x) / (l draft(x))). It is lossy.
- `verify_block` is block verification, which is lossless too.
- `AcceptByCoin` accepts at given rates, and is lossy.

A deterministic drafter has draft(x) = 1 for its token. So the residual max(0, target - draft) is the target's
distribution without that token.
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
        target_probabilities: [B, K + 1, V] float32, the target's distribution after each prefix of the draft tokens,
            beginning with the empty prefix.
        draft_tokens: [B, K].
        draft_probabilities: [B, K, V] float32, the distribution that each draft token was drawn from; None for a
            deterministic drafter.
        accept_uniforms: [B, K] in [0, 1), a random number for the test of each draft token.
        next_uniforms: [B, K + 1] in [0, 1), a random number for each position that the next token can have.
        lengths: [B] from 0 to K, how many draft tokens each row was offered. The other draft tokens are padding, and
            are never accepted.
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
        # The target has one position more than there are draft tokens. `gather` ignores the last one.
        self.target_probability = self.target_probabilities.gather(-1, tokens).squeeze(-1)
        if self.draft_probabilities is None:
            self.draft_probability = torch.ones_like(self.target_probability)
        else:
            self.draft_probability = self.draft_probabilities.gather(-1, tokens).squeeze(-1)


class Verdict(NamedTuple):
    """The outcome of a verification.

    Attributes:
        num_accepted: [B], the length of each row's accepted prefix: from 0 to the row's entry of `Offer.lengths`.
        next_token: [B], the token after that prefix: the bonus token if the whole offer was accepted, otherwise the
            recovered token. V if the weights from which it is drawn contain nan or are all zero.
    """

    num_accepted: Tensor
    next_token: Tensor


def verify(offer: Offer, *, lenience: float = 1.0) -> Verdict:
    """Keep a prefix of each row's draft tokens, and draw the token after it. With lenience 1, the kept tokens and the
    drawn token follow the target's distribution.
    """
    bound = offer.draft_probability
    if lenience != 1:
        bound = lenience * bound
    # This is the test u < target / draft, written without the division. A uniform u is below 1, so a token with equal
    # probabilities under target and draft is always accepted.
    return accepted_prefix(offer.accept_uniforms * bound < offer.target_probability, offer)


def accepted_prefix(passed: Tensor, offer: Offer) -> Verdict:
    """Keep the accepted prefix of each row, and draw the token after it.

    For example, if three tokens are offered and their tests give [True, False, True], only the first token is accepted.
    The next token then replaces the second.

    Args:
        passed: [B, K] bool, whether each token passed its test. Padding after a row's offer may have any value.
        offer: the offer. Its target probabilities need not sum to 1: `verify_block` scales them, because it draws the
            next token from max(0, scaled target - draft).
    """
    num_rows, num_draft_tokens = passed.shape
    # The number of tests that passed before the first failure.
    num_accepted = torch.minimum(passed.cumprod(-1).sum(-1), offer.lengths)
    rows = torch.arange(num_rows, device=passed.device)
    # [B, V]: the target's distribution after each row's accepted prefix.
    weights = offer.target_probabilities[rows, num_accepted]
    has_rejected = num_accepted < offer.lengths
    # The index of the rejected token. In a row without a rejected token it may be any index, because `is_recovered` is
    # False there.
    index = num_accepted.clamp(max=num_draft_tokens - 1)
    if offer.draft_probabilities is None:
        residual = weights.scatter(-1, offer.draft_tokens[rows, index].unsqueeze(-1), 0.0)
    else:
        residual = (weights - offer.draft_probabilities[rows, index]).clamp_(min=0)
    # The residual is all zero if the two distributions agree up to rounding, or if `AcceptByCoin` rejected the only
    # possible token. Then the next token is drawn from the target's distribution.
    is_recovered = has_rejected & (residual.sum(-1) > 0)
    weights = torch.where(is_recovered.unsqueeze(-1), residual, weights)
    next_token = inverse_cdf(weights, offer.next_uniforms[rows, num_accepted])
    return Verdict(num_accepted, next_token)


def verify_block(offer: Offer) -> Verdict:
    """Block verification, Sun et al. 2024 (arXiv:2403.10444, algorithm 2). It is lossless, and no lossless rule keeps
    more tokens on average.

    The idea: if the target finds a token more probable than the draft does, this surplus makes up for the deficit of
    other tokens of the block. For a block x_1 ... x_K, these numbers are computed:

        reach_0 = 1
        reach_i = min(1, reach_{i-1} target(x_i) / draft(x_i))
        mass_i  = the sum of the residual max(0, reach_i target - draft) after i tokens

    The prefix of i < K tokens passes with probability mass_i / (mass_i + 1 - reach_i), and the whole block with
    probability reach_K. The longest prefix that passes is kept, even if a shorter prefix did not pass. The next token
    is drawn from the residual after the kept prefix. If the whole block is kept, it is drawn from the target.

    Deterministic proposals are accepted as often as by `verify`: both rules keep at least i tokens with probability
    reach_i, which is then the product of the target's probabilities of these tokens.
    """
    reach = _reach(offer.target_probability, offer.draft_probability)
    scaled_target = reach.unsqueeze(-1) * offer.target_probabilities
    if offer.draft_probabilities is None:
        # A deterministic drafter gives probability 1 to its token, so the residual is the rest of the target's mass.
        residual_mass = reach[:, :-1] * (1 - offer.target_probability)
    else:
        residual = (scaled_target[:, :-1] - offer.draft_probabilities).clamp(min=0)
        residual_mass = residual.sum(-1)
    prefix_passes = _passes(residual_mass, reach, offer)
    # A token passes if a prefix passes that contains it: [False, True, False] becomes [True, True, False].
    passed = prefix_passes.flip(1).cumsum(1).flip(1) > 0
    return accepted_prefix(passed, replace(offer, target_probabilities=scaled_target))


def _reach(target_probability: Tensor, draft_probability: Tensor) -> Tensor:
    """Return reach_0 to reach_K of each row [B, K + 1]."""
    # Padding after a row's offered tokens may have draft probability 0.
    smallest = torch.finfo(torch.float32).tiny
    ratios = target_probability / draft_probability.clamp(min=smallest)
    reach = ratios.new_ones(len(ratios))
    prefixes = [reach]
    for ratio in ratios.unbind(1):
        reach = (reach * ratio).clamp(max=1)
        prefixes.append(reach)
    return torch.stack(prefixes, 1)


def _passes(residual_mass: Tensor, reach: Tensor, offer: Offer) -> Tensor:
    """Return which prefixes of 1 to K tokens pass, [B, K] bool. A prefix that is longer than the row's offer never
    passes.

    Args:
        residual_mass: mass_0 to mass_(K - 1), [B, K].
        reach: reach_0 to reach_K, [B, K + 1].
    """
    reach = reach[:, 1:]
    # The whole offer passes with probability reach. The formula for shorter prefixes gives this probability too, if
    # mass is replaced by reach: reach / (reach + 1 - reach) = reach.
    mass = torch.cat([residual_mass[:, 1:], reach[:, -1:]], 1)
    lengths = offer.lengths.unsqueeze(1)
    prefix_lengths = torch.arange(1, reach.shape[1] + 1, device=reach.device)
    mass = torch.where(prefix_lengths == lengths, reach, mass)
    passed = offer.accept_uniforms * (mass + 1 - reach) < mass
    return passed & (prefix_lengths <= lengths)


@dataclass(frozen=True)
class AcceptByCoin:
    """Accepts the draft token at each position at random, at a given rate. So one can measure how fast a pair would be
    if its draft were accepted this often.

    It replaces `verify` if `decoding.synthetic_acceptance` is set. The text does not follow any model's distribution.
    Lenience has no effect. It does as much work as `verify`, so that measured times are realistic.

    Attributes:
        rates: for each position, the probability in [0, 1] with which a draft token is accepted, given that the tokens
            before it were accepted. The last rate is used for all later positions.
    """

    rates: tuple[float, ...]

    def __call__(self, offer: Offer) -> Verdict:
        uniforms = offer.accept_uniforms
        passed = uniforms < self.rates[-1]
        num_draft_tokens = uniforms.shape[1]
        # Each rate is a number in the code. A tensor of the rates would be copied from the host in every call, and such
        # a copy cannot be captured in a CUDA graph.
        for position, rate in enumerate(self.rates[:-1][:num_draft_tokens]):
            passed[:, position] = uniforms[:, position] < rate
        return accepted_prefix(passed, offer)
