"""Drafters without a model: what they find in a text, in a bounded number of steps, and in the real loop."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chains import p_value_of_texts, requests, row_steps, small_chain, speculative, texts
from drafts import lookup_drafter
from fakes import MarkovRunner
from harness.local.decoding.loop import RowRequest, RowStep
from harness.local.decoding.protocols import Proposal, Step
from harness.local.decoding.verify import Verdict, verify
from harness.local.decoding.warp import Warp
from harness.local.drafting.text import LookupText, TextDrafter
from verifiers import FALSE_ALARM_RATE, without_residual

NOTHING = Step(torch.empty(0))


def test_an_ngram_may_be_as_long_as_the_text() -> None:
    """A search through all sizes up to this one would never end."""
    text = LookupText(10**15)
    text.extend([1, 2, 9, 1, 2])
    assert text.continuation(2) == [9, 1]


def looked_up(tokens: list[int], max_ngram: int, most: int) -> list[int]:
    """Without an index."""
    for size in range(max_ngram, 0, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                grown = list(tokens)
                for index in range(most):
                    grown.append(grown[begin + size + index])
                return grown[len(tokens) :]
    return []


@pytest.mark.parametrize("max_ngram", [3, 4, 1])
def test_lookup_finds_what_a_search_finds(max_ngram: int) -> None:
    generator = random.Random(0)
    found = 0
    for size in (2, 5, 30):
        text, tokens = LookupText(max_ngram), []
        for _ in range(120):
            tokens.append(generator.randrange(size))
            text.extend(tokens[-1:])
            assert text.continuation(5) == looked_up(tokens, max_ngram, 5)
            found += bool(text.continuation(5))
    assert 50 < found < 360


def run(
    target: Tensor, drafter: TextDrafter, what: list[RowRequest], k: int = 4
) -> list[list[RowStep]]:
    return list(speculative(MarkovRunner(target), drafter, what, k))


@pytest.mark.parametrize("rule", [verify, without_residual])
def test_the_loop_keeps_the_target_s_distribution(rule: Callable[..., Verdict]) -> None:
    """Chi-square over four tokens after one prompt; the broken twin is caught, with a p-value of 1e-50."""
    size, num_rows = 3, 1500
    target = small_chain(5, 0.8, size)
    what = requests([[0, 1, 0, 2, 0, 1]] * num_rows, Warp(1.0), 4)
    runner, drafter = MarkovRunner(target.float()), lookup_drafter()
    iterations = list(speculative(runner, drafter, what, 2, verification=rule))
    assert {row_step.num_accepted for row_step in row_steps(iterations)} == {0, 1, 2}
    p_value = p_value_of_texts(texts(iterations, num_rows), target, 1)
    assert (p_value > FALSE_ALARM_RATE) == (rule is verify)


def test_rows_are_followed() -> None:
    drafter = lookup_drafter()
    drafter.start([[1, 2, 3, 1, 2], [7], [4, 5, 6, 4, 5]], [3, 8, 6], NOTHING)
    proposal = drafter.propose(2, torch.zeros(3, 2))
    assert proposed(proposal) == [[1, 2], [], [4, 5]]
    drafter.observe([2, 0, 1], [[1, 2, 3], [9], [4, 9]], NOTHING)
    assert proposed(drafter.propose(3, torch.zeros(3, 3))) == [[1, 2, 3], [], []], "6 4 9 is new"
    drafter.observe([3, 0, 0], [[1, 2, 3, 1], [], [4]], NOTHING)  # the second has ended
    assert proposed(drafter.propose(1, torch.zeros(3, 1))) == [[2], [], [9]]
    drafter.observe([0, 0, 0], [[1], [], [1]], NOTHING)  # rejected
    drafter.start([[9, 9]], [1], NOTHING)
    empty = drafter.propose(4, torch.zeros(1, 4))
    assert (empty.tokens.shape, empty.tokens.dtype, empty.lengths) == ((1, 0), torch.long, [0])


def proposed(proposal: Proposal) -> list[list[int]]:
    assert proposal.probabilities is None
    assert proposal.lengths is not None
    return [
        row[:length] for row, length in zip(proposal.tokens.tolist(), proposal.lengths, strict=True)
    ]
