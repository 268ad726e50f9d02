"""The coin in place of the rule: its bias is the acceptance rate, independent of the models."""

from __future__ import annotations

import functools

import pytest
import torch
from scipy import stats
from torch import Tensor

from harness.local.decoding.randomness import uniforms
from harness.local.decoding.verify import AcceptByCoin, Offer, Verdict, verify

FALSE_ALARM_RATE = 1e-9
NUM_ROWS, NUM_DRAFT_TOKENS, SIZE = 8_000, 3, 7


@functools.cache
def proposal() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `verify`: distributions that agree on little, with uniforms from the streams of as many prompts."""
    generator = torch.Generator().manual_seed(3)
    target = torch.rand(NUM_ROWS, NUM_DRAFT_TOKENS + 1, SIZE, generator=generator) ** 6
    draft = torch.rand(NUM_ROWS, NUM_DRAFT_TOKENS, SIZE, generator=generator) ** 6
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    streams = uniforms(11, range(NUM_ROWS), NUM_DRAFT_TOKENS + 1)
    return target, draft.argmax(-1), draft, streams[:, :-1, 1], streams[:, :, 2]


def count_tests(verdict: Verdict) -> tuple[int, int]:
    """How many draft tokens were tested, and how many of them accepted."""
    accepted = int(verdict.num_accepted.sum())
    return accepted + int((verdict.num_accepted < NUM_DRAFT_TOKENS).sum()), accepted


@pytest.mark.parametrize("bias", [0.3, 0.8, 0.95])
def test_the_conditional_acceptance_rate_is_the_bias(bias: float) -> None:
    tested, accepted = count_tests(AcceptByCoin((bias,))(Offer(*proposal())))
    assert stats.binomtest(accepted, tested, bias).pvalue > FALSE_ALARM_RATE
    # The rule itself accepts another share of these proposals, and the same test sees it.
    tested, accepted = count_tests(verify(Offer(*proposal())))
    assert stats.binomtest(accepted, tested, bias).pvalue < FALSE_ALARM_RATE


def test_each_position_has_its_own_rate() -> None:
    rates = (0.9, 0.2)
    num_accepted = AcceptByCoin(rates)(Offer(*proposal())).num_accepted
    for place, rate in enumerate((*rates, rates[-1])):
        tested = int((num_accepted >= place).sum())
        accepted = int((num_accepted > place).sum())
        assert stats.binomtest(accepted, tested, rate).pvalue > FALSE_ALARM_RATE
        wrong = rates[(place + 1) % 2] if place < 2 else rates[0]
        assert stats.binomtest(accepted, tested, wrong).pvalue < FALSE_ALARM_RATE


def test_the_ends_of_the_scale() -> None:
    assert (AcceptByCoin((0.0,))(Offer(*proposal())).num_accepted == 0).all()
    assert (AcceptByCoin((1.0,))(Offer(*proposal())).num_accepted == NUM_DRAFT_TOKENS).all()


def test_what_follows_is_drawn_as_the_rule_draws_it() -> None:
    by_coin, by_rule = AcceptByCoin((0.5,))(Offer(*proposal())), verify(Offer(*proposal()))
    same = by_coin.num_accepted == by_rule.num_accepted
    assert set(by_coin.num_accepted[same].tolist()) == set(range(NUM_DRAFT_TOKENS + 1))
    assert torch.equal(by_coin.next_token[same], by_rule.next_token[same])


def test_rows_keep_to_the_tokens_they_were_offered() -> None:
    lengths = torch.arange(NUM_ROWS) % (NUM_DRAFT_TOKENS + 1)
    verdict = AcceptByCoin((1.0,))(Offer(*proposal(), lengths=lengths))
    assert torch.equal(verdict.num_accepted, lengths)
    nothing = torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0, 3), torch.empty(1, 0)
    empty = AcceptByCoin((1.0,))(Offer(torch.eye(3)[None, :1], *nothing, torch.zeros(1, 1)))
    assert (empty.num_accepted.tolist(), empty.next_token.tolist()) == ([0], [0])


def test_a_deterministic_proposal_is_accepted_by_the_same_coin() -> None:
    target, tokens, _, *numbers = proposal()
    verdict, drawn = (
        AcceptByCoin((0.5,))(Offer(target, tokens, None, *numbers)),
        AcceptByCoin((0.5,))(Offer(*proposal())),
    )
    assert torch.equal(verdict.num_accepted, drawn.num_accepted)
    assert (verdict.draft_probability == 1).all()
    rejected = verdict.num_accepted < NUM_DRAFT_TOKENS
    place = verdict.num_accepted.clamp(max=NUM_DRAFT_TOKENS - 1)
    assert (tokens[torch.arange(NUM_ROWS), place] != verdict.next_token)[rejected].all()
