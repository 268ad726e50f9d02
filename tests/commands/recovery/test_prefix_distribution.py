"""The exact distribution over the first tokens, against sums that can be done by hand and against `Warp`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from harness.commands.recovery.prefix_distribution import (
    PrefixDistribution,
    exact_distribution,
    exact_probabilities,
)
from harness.config.settings import DecodingSettings
from harness.decoding.warp import Warp
from table_engine import TableEngine

CHAIN = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]])


def chain(num_tokens: int, min_probability: float, **decoding: float) -> PrefixDistribution:
    settings = DecodingSettings(**({"temperature": 1.0} | decoding))
    return exact_distribution(TableEngine(CHAIN), [0], settings, num_tokens, min_probability)


def test_every_continuation_has_the_product_of_its_steps() -> None:
    distribution = chain(num_tokens=3, min_probability=0.0)
    assert len(distribution.prefixes) == 1 + 3 + 9 + 27
    for tokens in itertools.product(range(3), repeat=3):
        by_hand = CHAIN[0, tokens[0]] * CHAIN[tokens[0], tokens[1]] * CHAIN[tokens[1], tokens[2]]
        assert distribution.prefixes[tokens] == pytest.approx(by_hand.item(), rel=1e-6)
    # Every draw ends in a whole continuation, so nothing is left for the shorter prefixes.
    probabilities = dict(zip(distribution.prefixes, distribution.cells, strict=True))
    assert probabilities[()] == pytest.approx(0, abs=1e-9)
    assert sum(probabilities.values()) == pytest.approx(1)


def test_a_rare_prefix_counts_under_the_prefix_it_extends() -> None:
    distribution = chain(num_tokens=2, min_probability=0.14)
    # 0.6 (1, then 2: 0.36), 0.3 (2, then 0: 0.15); all else is rarer.
    assert set(distribution.prefixes) == {(), (1,), (2,), (1, 2), (2, 0)}
    expected = {(): 0.1, (1,): 0.24, (2,): 0.15, (1, 2): 0.36, (2, 0): 0.15}
    assert dict(zip(distribution.prefixes, distribution.cells, strict=True)) == pytest.approx(
        expected
    )
    draws = [[0, 2], [1, 2], [1, 1], [2, 0], [2, 0], [0, 0]]
    counts = dict(zip(distribution.prefixes, distribution.count(draws).tolist(), strict=True))
    assert counts == {(): 2, (1,): 1, (2,): 0, (1, 2): 1, (2, 0): 2}


def test_rare_tokens_after_a_common_prefix_are_tested_in_groups() -> None:
    """Ten equal tokens, none of which is known: a shift among them shows all the same."""
    uniform = TableEngine(torch.full((10, 10), 0.1))
    settings = DecodingSettings(temperature=1.0)
    distribution = exact_distribution(uniform, [0], settings, 1, 0.15)
    probabilities = dict(zip(distribution.prefixes, distribution.cells, strict=True))
    # Groups of two tokens, while two groups' mass is left.
    expected = {(-1,): 0.2, (-2,): 0.2, (-3,): 0.2, (-4,): 0.2, (): 0.2}
    assert probabilities == pytest.approx(expected)
    counts = dict(
        zip(
            distribution.prefixes, distribution.count([[token] for token in range(10)]), strict=True
        )
    )
    assert set(counts.values()) == {2}
    assert np.abs(
        distribution.shifted_cells(0, 0.1) - distribution.cells
    ).sum() / 2 == pytest.approx(0.1)
    longer = exact_distribution(uniform, [0], settings, 2, 0.15)
    assert set(longer.prefixes) == set(distribution.prefixes), "nothing is known behind a group"
    assert longer.first(1) == distribution


def test_fewer_tokens_are_a_marginal() -> None:
    longer, shorter = (chain(number, 0.01) for number in (3, 1))
    assert longer.first(1) == shorter
    assert longer.first(1).cells == pytest.approx(shorter.cells)


def test_a_shift_of_one_token_leaves_the_tokens_before_it() -> None:
    distribution = chain(num_tokens=2, min_probability=0.0)
    probabilities = dict(
        zip(distribution.prefixes, distribution.shifted_cells(1, 0.1), strict=True)
    )
    for first in range(3):
        rows = [probabilities[first, second] / CHAIN[0, first].item() for second in range(3)]
        assert sum(rows) == pytest.approx(1)
        assert np.abs(np.array(rows) - CHAIN[first].numpy()).sum() / 2 == pytest.approx(0.1)


def test_what_rounding_may_put_in_or_out_is_not_impossible() -> None:
    distribution = chain(num_tokens=1, min_probability=0.01, top_k=1)
    assert 0 < distribution.cells[0] < 1e-9


@pytest.mark.parametrize(
    "warp",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_the_reference_warps_as_the_loops_do(warp: dict[str, float]) -> None:
    logits = 3 * torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    exact = exact_probabilities(logits, DecodingSettings(**warp))
    assert exact.dtype == np.float64
    assert exact == pytest.approx(Warp(**warp)(logits).double().numpy(), abs=1e-6)
