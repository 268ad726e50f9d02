"""Arguments for rules of acceptance, a broken rule, and a test of the distribution that a rule yields."""

from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor

from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.verify import Offer, Verdict, verify

FALSE_ALARM_RATE = 1e-9


def arguments(
    num_rows: int, k: int, size: int = 6, seed: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `verify`: random distributions, with tokens drawn from the draft's."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(num_rows, k + 1, size, generator=generator) ** 4
    draft = torch.rand(num_rows, k, size, generator=generator) ** 4 + target[:, :k]
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    tokens = inverse_cdf(draft, torch.rand(num_rows, k, generator=generator))
    accept = torch.rand(num_rows, k, generator=generator)
    numbers = accept, torch.rand(num_rows, k + 1, generator=generator)
    return target, tokens, draft, *numbers


def offer_of(
    target: Tensor,
    tokens: Tensor,
    draft: Tensor | None,
    accept: Tensor,
    following: Tensor,
    lengths: Tensor | None = None,
) -> Offer:
    """An offer, of all K tokens in each row where no lengths are given."""
    if lengths is None:
        lengths = torch.full((len(tokens),), tokens.shape[1])
    return Offer(target, tokens, draft, accept, following, lengths)


def first_two_tokens(
    judge: Callable[..., Verdict], num_draws: int, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """Counts of the first two output tokens [V, V] over many draws with K = 2, and the target's exact probabilities.

    The target is a Markov chain, so that the distribution after a prefix depends on its last token alone. Deterministic
    proposals are ragged: a third of the rows is offered no token, a third one, and a third two.
    """
    generator = torch.Generator().manual_seed(20)
    size = 5
    target_first = torch.rand(size, generator=generator)
    target_next = torch.rand(size, size, generator=generator) ** 3
    draft_first = torch.rand(size, generator=generator)
    draft_next = torch.rand(size, size, generator=generator) ** 3
    target_next[2, 1] = draft_next[3, 0] = 0  # tokens only one of the two can produce
    for weights in (target_first, target_next, draft_first, draft_next):
        weights /= weights.sum(-1, keepdim=True)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    draft: Tensor | None = None
    if deterministic:
        x1 = draft_first.argmax().expand(num_draws)
        x2 = draft_next.argmax(-1)[x1]
    else:
        x1 = inverse_cdf(draft_first.expand(num_draws, size), uniform(num_draws))
        x2 = inverse_cdf(draft_next[x1], uniform(num_draws))
        draft = torch.stack([draft_first.expand(num_draws, size), draft_next[x1]], 1)
    first = target_first.expand(num_draws, size)
    target = torch.stack([first, target_next[x1], target_next[x2]], 1)
    lengths = {"lengths": torch.arange(num_draws) % 3} if deterministic else {}
    tokens = torch.stack([x1, x2], 1)
    numbers = uniform(num_draws, 2), uniform(num_draws, 3)
    verdict = judge(offer_of(target, tokens, draft, *numbers, **lengths))
    first = torch.where(verdict.num_accepted > 0, x1, verdict.next_token)
    # A row that stopped after its first token continues with regular decoding.
    regular = inverse_cdf(target_next[first], uniform(num_draws))
    after_one = torch.where(verdict.num_accepted == 1, verdict.next_token, regular)
    second = torch.where(verdict.num_accepted > 1, x2, after_one)
    counts = torch.bincount(first * size + second, minlength=size * size).view(size, size)
    return counts, target_first[:, None] * target_next


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    weights = probabilities[possible].double()
    expected = weights / weights.sum() * counts.sum()
    return float(stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


def without_residual(offer: Offer) -> Verdict:
    """Draws the recovered token from the target itself, as many first attempts do."""
    verdict = verify(offer)
    rows = torch.arange(len(offer.draft_tokens)), verdict.num_accepted
    drawn = inverse_cdf(offer.target_probabilities[rows], offer.next_uniforms[rows])
    return Verdict(verdict.num_accepted, drawn)
