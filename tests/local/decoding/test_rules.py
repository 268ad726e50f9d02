"""Block verification keeps the target's distribution and accepts more; typical acceptance keeps what it is said to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chains import RAGGED, chain, p_value_of_texts, request, small_chain, texts
from fakes import MarkovRunner, TableDrafter
from harness.local.decoding.randomness import inverse_cdf, uniforms
from harness.local.decoding.verify import Offer, Verdict, verify, verify_block, verify_typical
from harness.local.decoding.warp import Warp
from harness.local.drafting.model import ModelDrafter
from loops import autoregressive, speculative
from verifiers import FALSE_ALARM_RATE, arguments, first_two_tokens, p_value

Rule = Callable[..., Verdict]


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
    return Verdict(
        verdict.num_accepted, drawn, verdict.target_probability, verdict.draft_probability
    )


@pytest.mark.parametrize("table", [False, True], ids=["draft model", "deterministic"])
@pytest.mark.parametrize(
    ("rule", "redraw", "lossless"),
    [
        (verify_block, True, True),
        pytest.param(
            verify_block,
            False,
            False,
            id="numbers used again at positions whose tokens were discarded",
        ),
        (with_token_residual, True, False),
    ],
)
def test_the_loop_keeps_the_target_s_distribution(
    rule: Rule, redraw: bool, lossless: bool, table: bool
) -> None:
    """Chi-square over the first token and the K + 2 after it, false-alarm rate 1e-9; the broken twins are caught."""
    size, k, num_rows = 3, 2, 15_000
    target, draft = small_chain(5, 0.8, size), small_chain(6, 1.2, size).float()
    what = request([[0]] * num_rows, Warp(1.0), k + 3)
    what = dataclasses.replace(what, uniforms=uniforms(0, range(num_rows), (k + 4) * (k + 1)))
    drafter = TableDrafter({0: 2, 2: 1}) if table else ModelDrafter(MarkovRunner(draft), what.warp)
    drawn = texts(
        speculative(MarkovRunner(target.float()), drafter, what, k, 1.0, rule, redraw), num_rows
    )
    assert (p_value_of_texts(drawn, target, 0) > FALSE_ALARM_RATE) == lossless


@pytest.mark.parametrize("deterministic", [False, True])
def test_block_verification_and_typical_acceptance_as_units(deterministic: bool) -> None:
    """Ragged where deterministic, with tokens that only one of target and draft can produce."""
    assert p_value(*first_two_tokens(verify_block, 200_000, deterministic)) > FALSE_ALARM_RATE
    assert p_value(*first_two_tokens(verify_typical, 200_000, deterministic)) < FALSE_ALARM_RATE, (
        "is lossy"
    )


def test_the_motivating_example_of_the_paper() -> None:
    """Two tokens, target (1/3, 2/3), draft (2/3, 1/3), K = 2: token by token 10/9 are accepted, by block 11/9."""
    target, draft, steps = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3]), 120
    grid = (torch.arange(steps) + 0.5) / steps
    accept = torch.cartesian_prod(grid, grid)
    num_rows = len(accept)
    expected = {verify: 0.0, verify_block: 0.0}
    for rule in expected:
        for tokens in ([0, 0], [0, 1], [1, 0], [1, 1]):
            offered = torch.tensor(tokens).expand(num_rows, 2), draft.expand(num_rows, 2, 2)
            verdict = rule(
                Offer(target.expand(num_rows, 3, 2), *offered, accept, torch.zeros(num_rows, 3))
            )
            expected[rule] += float(draft[tokens].prod() * verdict.num_accepted.float().mean())
    assert expected[verify] == pytest.approx(10 / 9, abs=1e-3)
    assert expected[verify_block] == pytest.approx(11 / 9, abs=1e-3)


@pytest.mark.parametrize("rule", [verify, verify_block, verify_typical])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_is_judged_by_its_own_offer(rule: Rule, deterministic: bool) -> None:
    target, tokens, draft, accept, following = arguments(2000, 3)
    draft[1000:, 2, :] = 0  # behind the offer a draft distribution may be anything
    proposed = None if deterministic else draft
    lengths = torch.cat([torch.arange(1000) % 4, torch.arange(1000) % 3])
    ragged = rule(Offer(target, tokens, proposed, accept, following, lengths=lengths))
    for length in range(4):
        rows = lengths == length
        short = None if proposed is None else proposed[rows, :length]
        offered = target[rows, : length + 1], tokens[rows, :length], short
        alone = rule(Offer(*offered, accept[rows, :length], following[rows, : length + 1]))
        assert torch.equal(ragged.num_accepted[rows], alone.num_accepted)
        assert torch.equal(ragged.next_token[rows], alone.next_token)
        assert set(alone.num_accepted.tolist()) == set(range(length + 1))


@pytest.mark.parametrize(("rule", "lenience"), [(verify, 1.0), (verify, 0.6), (verify_block, 1.0)])
def test_a_deterministic_proposal_is_one_drawn_with_certainty(rule: Rule, lenience: float) -> None:
    target, _, _, *numbers = arguments(3000, 3)
    tokens = target[:, :3].argmax(-1)
    certain = torch.nn.functional.one_hot(tokens, 6).float()
    lengths = torch.arange(3000) % 4
    ours = rule(Offer(target, tokens, None, *numbers, lenience, lengths))
    dense = rule(Offer(target, tokens, certain, *numbers, lenience, lengths))
    assert set(ours.num_accepted.tolist()) == {0, 1, 2, 3}
    assert torch.equal(ours.num_accepted, dense.num_accepted)
    assert torch.equal(ours.next_token, dense.next_token)
    assert torch.equal(ours.draft_probability, torch.ones(3000, 3))


@pytest.mark.parametrize("rule", [verify_block, verify_typical])
def test_greedy_output_is_the_regular_one(rule: Rule) -> None:
    target = chain(0)
    what = request(RAGGED, length=40)
    drafter = ModelDrafter(MarkovRunner(0.5 * target + 0.5 * chain(1)), what.warp)
    output = texts(speculative(MarkovRunner(target), drafter, what, 4, 1.0, rule), 3)
    assert output == texts(autoregressive(MarkovRunner(target), what), 3)


@pytest.mark.parametrize("rule", [verify, verify_block])
def test_equal_distributions_are_never_rejected(rule: Rule) -> None:
    target, tokens, *_ = arguments(500, 3)
    accept = torch.full((500, 3), 1 - 2**-24)
    assert (
        rule(Offer(target, tokens, target[:, :3], accept, torch.rand(500, 4))).num_accepted == 3
    ).all()


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("lengths", [None, torch.tensor([1])])
def test_what_the_target_cannot_draw_is_rejected_whatever_the_number(
    rule: Rule, lengths: Tensor | None
) -> None:
    target, draft = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
    given = target, torch.tensor([[0]]), draft, torch.zeros(1, 1), torch.zeros(1, 2)
    verdict = rule(Offer(*given, lengths=lengths))
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([0], [1])


def test_lenience_accepts_more() -> None:
    given = arguments(5000, 3)
    strict, lenient = verify_block(Offer(*given)), verify_block(Offer(*given, lenience=0.5))
    assert lenient.num_accepted.sum() > strict.num_accepted.sum()
    counted = first_two_tokens(
        lambda offer: verify_block(dataclasses.replace(offer, lenience=0.5)), 200_000
    )
    assert p_value(*counted) < FALSE_ALARM_RATE


@pytest.mark.parametrize(
    ("probabilities", "accepted"),
    [
        ([0.1, 0.9], 1),  # entropy 0.33: above epsilon
        ([0.08, 0.92], 0),
        ([0.04] * 25, 1),  # entropy log 25: the threshold is 0.3 / 25 = 0.012
        ([0.011] + [0.989 / 24] * 24, 0),
    ],
)
def test_a_typical_token_is_accepted(probabilities: list[float], accepted: int) -> None:
    target = torch.tensor([[probabilities, probabilities]])
    given = target, torch.tensor([[0]]), None, torch.tensor([[0.999]])
    assert verify_typical(Offer(*given, torch.zeros(1, 2))).num_accepted.item() == accepted
    following = verify_typical(Offer(*given, torch.full((1, 2), 0.9999))).next_token.item()
    assert following == probabilities.index(max(probabilities)), "Medusa's code takes the likeliest"
    assert (
        verify_typical(
            Offer(*given, torch.zeros(1, 2)), epsilon=0.01, delta=0.01
        ).num_accepted.item()
        == 1
    )


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize(("uniform", "expected"), [(0.2, 0), (0.3, 1)])
def test_without_draft_tokens_the_target_is_sampled(
    rule: Rule, uniform: float, expected: int
) -> None:
    nothing = torch.empty(1, 0, dtype=torch.long), None, torch.empty(1, 0)
    verdict = rule(Offer(torch.tensor([[[0.25, 0.75]]]), *nothing, torch.tensor([[uniform]])))
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([0], [expected])
