"""Which rule cut these texts? The loop's own rules decide texts of Markov chains, and each must be named.

An interval leaves the truth out in two of a million.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.rules import typical_threshold, verify_block, verify_typical
from harness.local.decoding.verify import Offer, Verdict, verify
from harness.local.decoding.warp import Warp
from harness.results.statistics.iterations import acceptance_chances, cut
from harness.results.statistics.served_rules import TextProbabilities, expected_by_rule

SIZE = 12
K = 6
LENGTH = 64
NUM_TEXTS = 70


def compared(offer: Offer) -> Verdict:
    return verify(dataclasses.replace(offer, draft_probabilities=None))


def greedy(offer: Offer) -> Verdict:
    likeliest = Warp(temperature=0)(offer.target_probabilities)
    return compared(dataclasses.replace(offer, target_probabilities=likeliest))


RULES: dict[str, Callable[[Offer], Verdict]] = {
    "rejection": verify,
    "block": verify_block,
    "comparison": compared,
    "greedy": greedy,
    "typical": verify_typical,
}


def chains(seed: int) -> tuple[Tensor, Tensor]:
    """Transitions [V, V] of a target, and of a draft that is nearly right."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(SIZE, SIZE, generator=generator)
    other = logits + 1.2 * torch.randn(SIZE, SIZE, generator=generator)
    return logits.softmax(-1), other.softmax(-1)


def decoded(
    rule: Callable[[Offer], Verdict], target: Tensor, draft: Tensor, seed: int
) -> tuple[list[list[int]], int]:
    """Texts of a length, and the iterations that they took."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    first = inverse_cdf(target[0].expand(NUM_TEXTS, SIZE), uniform(NUM_TEXTS))
    texts = [[token] for token in first.tolist()]
    num_iterations = 0
    while rows := [row for row, text in enumerate(texts) if len(text) < LENGTH]:
        last = torch.tensor([texts[row][-1] for row in rows])
        left = torch.tensor([LENGTH - len(texts[row]) for row in rows])
        proposed = []
        for _ in range(K):
            before = proposed[-1] if proposed else last
            proposed.append(inverse_cdf(draft[before], uniform(len(rows))))
        tokens = torch.stack(proposed, 1)
        before = torch.cat([last[:, None], tokens], 1)
        offer = Offer(
            target[before],
            tokens,
            draft[before[:, :-1]],
            uniform(len(rows), K),
            uniform(len(rows), K + 1),
            lengths=(left - 1).clamp(max=K),
        )
        verdict = rule(offer)
        decided = zip(
            rows,
            tokens.tolist(),
            verdict.num_accepted.tolist(),
            verdict.next_token.tolist(),
            strict=True,
        )
        for row, of_draft, count, following in decided:
            texts[row] += [*of_draft[:count], following]
        num_iterations += len(rows)
    return texts, num_iterations


def read(texts: list[list[int]], target: Tensor, draft: Tensor) -> list[TextProbabilities]:
    tokens = torch.tensor(texts)
    before = torch.cat([torch.zeros(len(texts), 1, dtype=torch.int64), tokens[:, :-1]], 1)
    likeliest = target.argmax(-1)[before] == tokens
    typical = target > typical_threshold(torch.special.entr(target).sum(-1))[:, None]
    kept = typical[before, tokens]
    others = typical.sum(-1)[before] > kept.int()
    of_draft = draft[tokens[:, :-1], tokens[:, 1:]].double().numpy()
    padded = np.pad(of_draft, ((0, 0), (0, K - 1)), constant_values=np.nan)
    offers = np.lib.stride_tricks.sliding_window_view(padded, K, axis=1)
    of_target = target[before, tokens].double().numpy()
    parts = (of_target, offers, likeliest.numpy(), kept.numpy(), others.numpy())
    return [TextProbabilities(*of_text) for of_text in zip(*parts, strict=True)]


def named(
    rule: str, seed: int, another_draft: int | None = None
) -> tuple[list[str], dict[str, float]]:
    """The rules that explain texts by this one, and what each would give.

    Args:
        another_draft: the seed of one that proposed, in place of the one that the texts are read with.
    """
    target, draft = chains(seed)
    proposing = draft if another_draft is None else chains(another_draft)[1]
    texts, num_iterations = decoded(RULES[rule], target, proposing, seed)
    served = NUM_TEXTS * (LENGTH - 1) / num_iterations
    probabilities = read(texts, target, draft)
    is_own = rule in ("rejection", "block", "comparison")
    fits = expected_by_rule(probabilities, K, own_texts=is_own)
    rates = {fit.rule: fit.tokens_per_iteration.estimate for fit in fits} | {"served": served}
    return [fit.rule for fit in fits if fit.explains(served)], rates


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_named(rule: str) -> None:
    for seed in range(12):
        names, rates = named(rule, seed)
        assert names == [rule], (seed, rates)


def test_another_draft_is_not_taken_for_this_one() -> None:
    """By chance another rule may accept as often."""
    for seed in range(3):
        assert "rejection" not in named("rejection", seed, another_draft=seed + 7)[0]


def test_greedy_drafts_are_compared_and_rejected_alike() -> None:
    """So they have one name."""
    target, draft = chains(0)
    greedily = Warp(temperature=0)(draft)
    texts, _ = decoded(verify, target, greedily, 0)
    fits = expected_by_rule(read(texts, target, greedily), K, own_texts=True)
    assert [fit.rule for fit in fits] == ["rejection", "greedy", "typical"]


def test_limits_allow_chance_and_rounding() -> None:
    """As the cuts for all K have them, of texts of several lengths with drafts that end early."""
    target, draft = chains(3)
    texts, _ = decoded(verify, target, draft, 3)
    read_texts = read(texts, target, draft)
    ragged = []
    for number, text in enumerate(read_texts):
        kept = 20 + number % 30
        offers = text.draft[:kept].copy()
        offers[::7, 2:] = np.nan
        flags = text.is_likeliest, text.is_typical, text.others_typical
        ragged.append(
            TextProbabilities(
                text.target[: kept + 1], offers, *(each[: kept + 1] for each in flags)
            )
        )
    rejection = expected_by_rule(ragged, 4, own_texts=True)[0].tokens_per_iteration
    cuts = [cut(acceptance_chances(text.target, text.draft[:, :4])) for text in ragged]
    num_tokens = sum(each.num_tokens for each in cuts)
    iterations = sum(each.iterations[-1] for each in cuts)
    spread = 4.75 * sum(each.variance[-1] for each in cuts) ** 0.5
    assert rejection.estimate == pytest.approx(num_tokens / iterations)
    assert rejection.low == pytest.approx(0.97 * num_tokens / (iterations + spread))
    assert rejection.high == pytest.approx(1.03 * num_tokens / (iterations - spread))


def by_hand(length: int, draft: float) -> TextProbabilities:
    """A text whose tokens are the target's likeliest, each with a chance of 0.8."""
    flags = np.ones(length, bool)
    offers = np.full((length - 1, 1), draft)
    return TextProbabilities(np.full(length, 0.8), offers, flags, flags, flags)


def test_of_typical_acceptance_only_limits_are_known_where_other_tokens_are_typical_too() -> None:
    """Two tokens in one iteration if the draft token is kept, which it was in half of such texts or in all."""
    fits = {fit.rule: fit for fit in expected_by_rule([by_hand(3, 0.5)], 1, own_texts=True)}
    assert fits["comparison"].tokens_per_iteration.estimate == pytest.approx(2 / 1.5)
    assert fits["rejection"].tokens_per_iteration.estimate == pytest.approx(2 / (2 - 0.5 / 0.8))
    typical = fits["typical"].tokens_per_iteration
    assert (typical.estimate, typical.high) == pytest.approx(((2 / 1.5 + 2) / 2, 1.03 * 2))
    assert typical.low == pytest.approx(0.97 * 2 / (1.5 + 4.75 * 0.5))
    assert fits["comparison"].tokens_per_iteration.high == pytest.approx(1.03 * 2)
    no_other = dataclasses.replace(by_hand(3, 0.5), others_typical=np.zeros(3, bool))
    last = expected_by_rule([no_other], 1, own_texts=True)[-1]
    assert last.tokens_per_iteration.estimate == pytest.approx(2 / 1.5)


@pytest.mark.parametrize(
    ("other", "greedy", "typical"),
    [([50], True, False), ([0, 50, 200], True, False), ([1, 199], False, True), ([], True, False)],
)
def test_one_token_of_two_hundred_may_be_another_than_the_rule_writes(
    other: list[int], greedy: bool, typical: bool
) -> None:
    """The first one counts for no rule, and the last, for which nothing is offered, does not either."""
    text = by_hand(201, 0.5)
    is_likeliest = text.is_likeliest.copy()
    is_likeliest[other] = False
    texts = [dataclasses.replace(text, is_likeliest=is_likeliest)]
    writes = {fit.rule: fit.writes for fit in expected_by_rule(texts, 1, own_texts=False)}
    assert writes == {"rejection": False, "comparison": False, "greedy": greedy, "typical": typical}
