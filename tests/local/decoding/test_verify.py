"""Rules of acceptance as units: chosen numbers first, then the distribution of their output, alone and in the loop."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from chains import p_value_of_texts, requests, small_chain, speculative, texts
from fakes import MarkovRunner, TableDrafter
from harness.local.decoding.randomness import Purpose, inverse_cdf, uniforms
from harness.local.decoding.verify import AcceptByCoin, Offer, Verdict, verify, verify_block
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from verifiers import (
    FALSE_ALARM_RATE,
    arguments,
    first_two_tokens,
    offer_of,
    p_value,
    without_residual,
)

Rule = Callable[..., Verdict]


def test_greedy_is_one_hot_on_the_first_maximum() -> None:
    assert Warp(temperature=0)(torch.tensor([[1.0, 3.0, 3.0]])).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.5, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-300])
def test_a_warp_equals_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected).softmax(-1)
    torch.testing.assert_close(Warp(temperature, top_k, top_p)(logits), expected)
    assert Warp(temperature, top_k, top_p)(logits.bfloat16()).dtype == torch.float32


def one_hot(*tokens: int, size: int = 4) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), size).float()


@pytest.mark.parametrize("rule", [verify, verify_block])
def test_rows_are_judged_apart(rule: Rule) -> None:
    """All is accepted, and a bonus follows; then the second or the first token cannot be, and what follows is lost."""
    target = torch.stack([one_hot(1, 2, 3), one_hot(1, 0, 3), one_hot(0, 2, 3)])
    tokens = torch.tensor([[1, 2]]).expand(3, 2)
    accept = torch.tensor([[0.999, 0.999], [0.0, 0.0], [0.0, 0.0]])
    draft = one_hot(1, 2).expand(3, 2, 4)
    for lengths in (None, torch.tensor([2, 2, 1])):
        verdict = rule(offer_of(target, tokens, draft, accept, torch.zeros(3, 3), lengths=lengths))
        assert verdict.num_accepted.tolist() == [2, 1, 0]
        assert verdict.next_token.tolist() == [3, 0, 0]


@pytest.mark.parametrize(("uniform", "accepted"), [(0.0, 1), (0.49, 1), (0.51, 0)])
def test_acceptance_compares_the_uniform_with_the_ratio(uniform: float, accepted: int) -> None:
    target = torch.tensor([[[0.4, 0.6], [1.0, 0.0]]])
    draft = torch.tensor([[[0.8, 0.2]]])
    accept = torch.tensor([[uniform]])
    offer = offer_of(target, torch.tensor([[0]]), draft, accept, torch.zeros(1, 2))
    assert verify(offer).num_accepted.item() == accepted
    assert offer.target_probability.item() == pytest.approx(0.4)
    assert offer.draft_probability.item() == pytest.approx(0.8)


@pytest.mark.parametrize("rule", [verify, verify_block])
def test_equal_distributions_are_never_rejected(rule: Rule) -> None:
    target, tokens, *_ = arguments(500, 3)
    accept = torch.full((500, 3), 1 - 2**-24)
    verdict = rule(offer_of(target, tokens, target[:, :3], accept, torch.rand(500, 4)))
    assert (verdict.num_accepted == 3).all()


def test_a_rejection_between_models_that_differ_by_rounding_alone_is_drawn_from_the_target() -> (
    None
):
    """It leaves no residual."""
    target = torch.full((1, 2, 2), 0.5)
    draft = target[:, :1].clone()
    draft[..., 0] = draft[..., 0].nextafter(torch.tensor(1.0))
    accept, following = torch.full((1, 1), 1 - 2**-24), torch.full((1, 2), 0.25)
    verdict = verify(offer_of(target, torch.tensor([[0]]), draft, accept, following))
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([0], [0])


@pytest.mark.parametrize("rule", [verify, verify_block])
def test_a_rule_that_is_traced_keeps_no_fake_tensor(rule: Rule) -> None:
    offered = arguments(1, 3)
    expected = rule(offer_of(*offered))
    with FakeTensorMode() as fake:
        rule(offer_of(*map(fake.from_tensor, offered)))
    found = rule(offer_of(*offered))
    assert not isinstance(found.next_token, FakeTensor)
    assert torch.equal(found.next_token, expected.next_token)


def test_lenience_accepts_more() -> None:
    target, tokens, draft, *numbers = arguments(5000, 3)
    for proposed in (draft, None):
        offer = offer_of(target, tokens, proposed, *numbers)
        lenient = verify(offer, lenience=0.5)
        assert lenient.num_accepted.sum() > verify(offer).num_accepted.sum()


def test_the_motivating_example_of_block_verification() -> None:
    """Two tokens, target (1/3, 2/3), draft (2/3, 1/3), K = 2: token by token 10/9 are accepted, by block 11/9."""
    target, draft, steps = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3]), 120
    grid = (torch.arange(steps) + 0.5) / steps
    accept = torch.cartesian_prod(grid, grid)
    num_rows = len(accept)
    expected = {verify: 0.0, verify_block: 0.0}
    for rule in expected:
        for tokens in ([0, 0], [0, 1], [1, 0], [1, 1]):
            offered = torch.tensor(tokens).expand(num_rows, 2), draft.expand(num_rows, 2, 2)
            numbers = accept, torch.zeros(num_rows, 3)
            verdict = rule(offer_of(target.expand(num_rows, 3, 2), *offered, *numbers))
            expected[rule] += float(draft[tokens].prod() * verdict.num_accepted.float().mean())
    assert expected[verify] == pytest.approx(10 / 9, abs=1e-3)
    assert expected[verify_block] == pytest.approx(11 / 9, abs=1e-3)


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_is_judged_by_its_own_offer(rule: Rule, deterministic: bool) -> None:
    target, tokens, draft, accept, following = arguments(2000, 3)
    draft[1000:, 2, :] = 0  # behind the offer a draft distribution may be anything
    proposed = None if deterministic else draft
    lengths = torch.cat([torch.arange(1000) % 4, torch.arange(1000) % 3])
    ragged = rule(offer_of(target, tokens, proposed, accept, following, lengths=lengths))
    undrafted = lengths == 0
    drawn = inverse_cdf(target[undrafted, 0], following[undrafted, 0])
    assert torch.equal(ragged.next_token[undrafted], drawn)
    for length in range(1, 4):
        rows = lengths == length
        short = None if proposed is None else proposed[rows, :length]
        offered = target[rows, : length + 1], tokens[rows, :length], short
        alone = rule(offer_of(*offered, accept[rows, :length], following[rows, : length + 1]))
        assert torch.equal(ragged.num_accepted[rows], alone.num_accepted)
        assert torch.equal(ragged.next_token[rows], alone.next_token)
        assert set(alone.num_accepted.tolist()) == set(range(length + 1))


@pytest.mark.parametrize(
    "rule",
    [verify, functools.partial(verify, lenience=0.6), verify_block],
    ids=["plain", "lenient", "block"],
)
def test_a_deterministic_proposal_is_one_drawn_with_certainty(rule: Rule) -> None:
    target, _, _, accept, following = arguments(3000, 3)
    tokens = target[:, :3].argmax(-1)
    certain = torch.nn.functional.one_hot(tokens, 6).float()
    lengths = torch.arange(3000) % 4
    offer = offer_of(target, tokens, None, accept, following, lengths)
    ours = rule(offer)
    dense = rule(offer_of(target, tokens, certain, accept, following, lengths))
    assert set(ours.num_accepted.tolist()) == {0, 1, 2, 3}
    assert torch.equal(ours.num_accepted, dense.num_accepted)
    assert torch.equal(ours.next_token, dense.next_token)
    assert torch.equal(offer.draft_probability, torch.ones(3000, 3))


def lenient(offer: Offer) -> Verdict:
    return verify(offer, lenience=0.7)


def ignoring_draft(offer: Offer) -> Verdict:
    """Accepts with the target's probability alone."""
    even = torch.ones_like(offer.target_probabilities[:, 1:]) / offer.target_probabilities.shape[-1]
    return verify(dataclasses.replace(offer, draft_probabilities=even))


def always_excluding(offer: Offer) -> Verdict:
    """Excludes the next token of the batch's width even where the row was not offered it."""
    verdict, target, tokens = verify(offer), offer.target_probabilities, offer.draft_tokens
    rows, place = torch.arange(len(tokens)), verdict.num_accepted.clamp(max=1)
    weights = target[rows, verdict.num_accepted].scatter(-1, tokens[rows, place].unsqueeze(-1), 0.0)
    drawn = inverse_cdf(weights, offer.next_uniforms[rows, verdict.num_accepted])
    next_token = torch.where(verdict.num_accepted < 2, drawn, verdict.next_token)
    return verdict._replace(next_token=next_token)


def with_token_residual(offer: Offer) -> Verdict:
    """Draws what follows a rejection as `verify` would, or from the whole target; not from the prefix's residual."""
    verdict, target, tokens = verify_block(offer), offer.target_probabilities, offer.draft_tokens
    rows, place = torch.arange(len(tokens)), verdict.num_accepted.clamp(max=tokens.shape[1] - 1)
    weights = target[rows, verdict.num_accepted]
    if offer.draft_probabilities is not None:
        residual = (weights - offer.draft_probabilities[rows, place]).clamp(min=0)
        rejected = (verdict.num_accepted < tokens.shape[1]) & (residual.sum(-1) > 0)
        weights = torch.where(rejected.unsqueeze(-1), residual, weights)
    drawn = inverse_cdf(weights, offer.next_uniforms[rows, verdict.num_accepted])
    return verdict._replace(next_token=drawn)


@pytest.mark.parametrize(
    ("rule", "deterministic", "lossless"),
    [
        *((rule, drawn, True) for rule in (verify, verify_block) for drawn in (False, True)),
        *((rule, drawn, False) for rule in (lenient, without_residual) for drawn in (False, True)),
        (ignoring_draft, False, False),
        (always_excluding, True, False),
    ],
)
def test_output_follows_the_target_and_that_of_a_broken_rule_does_not(
    rule: Rule, deterministic: bool, lossless: bool
) -> None:
    """Ragged where deterministic, with tokens that only one of target and draft can produce."""
    counted = first_two_tokens(rule, 200_000, deterministic)
    assert (p_value(*counted) > FALSE_ALARM_RATE) == lossless


@pytest.mark.parametrize("table", [False, True], ids=["draft model", "deterministic"])
@pytest.mark.parametrize(
    ("rule", "redraw", "lossless", "num_rows"),
    [
        (verify_block, True, True, 15_000),
        # Numbers are used again at positions whose tokens were discarded.
        (verify_block, False, False, 15_000),
        (with_token_residual, True, False, 4_000),
    ],
)
def test_the_loop_keeps_the_target_s_distribution(
    rule: Rule, redraw: bool, lossless: bool, num_rows: int, table: bool
) -> None:
    """Chi-square over the first token and the K + 2 after it, false-alarm rate 1e-9; the broken twins are caught."""
    size, k = 3, 2
    target, draft = small_chain(5, 0.8, size), small_chain(6, 1.2, size).float()
    what = requests([[0]] * num_rows, Warp(1.0), k + 3, num_positions=(k + 4) * (k + 1))
    model = ModelDrafter(MarkovRunner(draft), what[0].warp)
    drafter = TableDrafter({0: 2, 2: 1}) if table else model
    runner = MarkovRunner(target.float())
    iterations = speculative(runner, drafter, what, k, verification=rule, redraw=redraw)
    drawn = texts(iterations, num_rows)
    assert (p_value_of_texts(drawn, target, 0) > FALSE_ALARM_RATE) == lossless


NUM_ROWS, NUM_DRAFT_TOKENS, SIZE = 8_000, 3, 7


@functools.cache
def offer() -> Offer:
    """Distributions that agree on little, with uniforms from the streams of as many prompts."""
    generator = torch.Generator().manual_seed(3)
    target = torch.rand(NUM_ROWS, NUM_DRAFT_TOKENS + 1, SIZE, generator=generator) ** 6
    draft = torch.rand(NUM_ROWS, NUM_DRAFT_TOKENS, SIZE, generator=generator) ** 6
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    streams = uniforms(11, 0, NUM_ROWS * (NUM_DRAFT_TOKENS + 1)).view(NUM_ROWS, -1, len(Purpose))
    return offer_of(target, draft.argmax(-1), draft, streams[:, :-1, 1], streams[:, :, 2])


@pytest.mark.parametrize("rates", [(0.3,), (0.95,), (0.9, 0.2), (0.0,), (1.0,)])
def test_a_coin_accepts_at_its_rate_at_each_position_and_the_rule_does_not(
    rates: tuple[float, ...],
) -> None:
    num_accepted = AcceptByCoin(rates)(offer()).num_accepted
    for place, rate in enumerate((rates[0], rates[-1], rates[-1])):
        tested = int((num_accepted >= place).sum())
        accepted = int((num_accepted > place).sum())
        assert not tested or stats.binomtest(accepted, tested, rate).pvalue > FALSE_ALARM_RATE
    accepted = int((verify(offer()).num_accepted > 0).sum())
    assert stats.binomtest(accepted, NUM_ROWS, rates[0]).pvalue < FALSE_ALARM_RATE


def test_what_follows_a_coin_is_drawn_as_the_rule_draws_it() -> None:
    by_coin, by_rule = AcceptByCoin((0.5,))(offer()), verify(offer())
    same = by_coin.num_accepted == by_rule.num_accepted
    assert set(by_coin.num_accepted[same].tolist()) == set(range(NUM_DRAFT_TOKENS + 1))
    assert torch.equal(by_coin.next_token[same], by_rule.next_token[same])


def test_a_coin_keeps_to_the_tokens_that_were_offered() -> None:
    lengths = torch.arange(NUM_ROWS) % (NUM_DRAFT_TOKENS + 1)
    verdict = AcceptByCoin((1.0,))(dataclasses.replace(offer(), lengths=lengths))
    assert torch.equal(verdict.num_accepted, lengths)
    certain = AcceptByCoin((0.5,))(dataclasses.replace(offer(), draft_probabilities=None))
    assert torch.equal(certain.num_accepted, AcceptByCoin((0.5,))(offer()).num_accepted)
    rejected = certain.num_accepted < NUM_DRAFT_TOKENS
    place = certain.num_accepted.clamp(max=NUM_DRAFT_TOKENS - 1)
    tokens = offer().draft_tokens[torch.arange(NUM_ROWS), place]
    assert (tokens != certain.next_token)[rejected].all()
