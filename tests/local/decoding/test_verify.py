"""Verification as a unit: chosen numbers first, then the distribution of its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.verify import Offer, Verdict, verify
from verifiers import FALSE_ALARM_RATE, first_two_tokens, p_value, without_residual


def one_hot(*tokens: int, size: int = 4) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), size).float()


def test_rows_are_judged_apart() -> None:
    """All is accepted, and a bonus follows; then the second or the first token cannot be, and what follows is lost."""
    target = torch.stack([one_hot(1, 2, 3), one_hot(1, 0, 3), one_hot(0, 2, 3)])
    tokens = torch.tensor([[1, 2]]).expand(3, 2)
    accept = torch.tensor([[0.999, 0.999], [0.0, 0.0], [0.0, 0.0]])
    verdict = verify(
        Offer(target, tokens, one_hot(1, 2).expand(3, 2, 4), accept, torch.zeros(3, 3))
    )
    assert verdict.num_accepted.tolist() == [2, 1, 0]
    assert verdict.next_token.tolist() == [3, 0, 0]


@pytest.mark.parametrize(("uniform", "accepted"), [(0.0, 1), (0.49, 1), (0.51, 0)])
def test_acceptance_compares_the_uniform_with_the_ratio(uniform: float, accepted: int) -> None:
    target = torch.tensor([[[0.4, 0.6], [1.0, 0.0]]])
    draft = torch.tensor([[[0.8, 0.2]]])
    verdict = verify(
        Offer(target, torch.tensor([[0]]), draft, torch.tensor([[uniform]]), torch.zeros(1, 2))
    )
    assert verdict.num_accepted.item() == accepted
    assert verdict.target_probability.item() == pytest.approx(0.4)
    assert verdict.draft_probability.item() == pytest.approx(0.8)


def test_output_follows_the_target() -> None:
    assert p_value(*first_two_tokens(verify, 200_000)) > FALSE_ALARM_RATE


def lenient(offer: Offer) -> Verdict:
    return verify(dataclasses.replace(offer, lenience=0.7))


def ignoring_draft(offer: Offer) -> Verdict:
    """Accepts with the target's probability alone."""
    even = torch.ones_like(offer.target_probabilities[:, 1:]) / offer.target_probabilities.shape[-1]
    return verify(dataclasses.replace(offer, draft_probabilities=even))


@pytest.mark.parametrize("broken", [lenient, without_residual, ignoring_draft])
def test_the_same_test_catches_a_broken_verifier(broken: Callable[..., Verdict]) -> None:
    assert p_value(*first_two_tokens(broken, 200_000)) < FALSE_ALARM_RATE


def always_excluding(offer: Offer) -> Verdict:
    """Excludes the next token of the batch's width even where the row was not offered it."""
    verdict, target, tokens = verify(offer), offer.target_probabilities, offer.draft_tokens
    rows, place = torch.arange(len(tokens)), verdict.num_accepted.clamp(max=1)
    weights = target[rows, verdict.num_accepted].scatter(-1, tokens[rows, place].unsqueeze(-1), 0.0)
    drawn = inverse_cdf(weights, offer.next_uniforms[rows, verdict.num_accepted])
    next_token = torch.where(verdict.num_accepted < 2, drawn, verdict.next_token)
    return Verdict(
        verdict.num_accepted, next_token, verdict.target_probability, verdict.draft_probability
    )


def test_output_of_deterministic_proposals_follows_the_target() -> None:
    assert p_value(*first_two_tokens(verify, 200_000, deterministic=True)) > FALSE_ALARM_RATE


@pytest.mark.parametrize("broken", [lenient, without_residual, always_excluding])
def test_the_same_test_catches_a_broken_verifier_of_deterministic_proposals(
    broken: Callable[..., Verdict],
) -> None:
    assert p_value(*first_two_tokens(broken, 200_000, deterministic=True)) < FALSE_ALARM_RATE


def test_lenience_accepts_more_of_a_deterministic_proposal() -> None:
    target = torch.tensor([[[0.4, 0.6], [1.0, 0.0]]])
    arguments = (target, torch.tensor([[0]]), None, torch.tensor([[0.7]]), torch.zeros(1, 2))
    strict, lenient = verify(Offer(*arguments)), verify(Offer(*arguments, lenience=0.5))
    assert (strict.num_accepted.item(), strict.next_token.item()) == (0, 1), (
        "the rejected token cannot follow"
    )
    assert (lenient.num_accepted.item(), lenient.next_token.item()) == (1, 0)
