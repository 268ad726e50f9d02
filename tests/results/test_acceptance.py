from __future__ import annotations

import pytest

from harness.results.acceptance import Acceptance

# Five iterations with K = 3 and one cut short to K = 1.
OUTCOMES = [(3, 3), (3, 0), (3, 1), (3, 1), (3, 2), (1, 1)]


def test_every_rate_from_its_definition() -> None:
    acceptance = Acceptance.of(OUTCOMES)
    assert acceptance.num_iterations == 6
    assert acceptance.num_proposed == 16
    assert acceptance.num_accepted == 8
    assert acceptance.columns() == {
        "acceptance_rate": 8 / 16,
        "conditional_acceptance_rate": 8 / (3 + 1 + 2 + 2 + 3 + 1),
        "mean_acceptance_length": pytest.approx(1 + 8 / 6),
        "mean_proposed": pytest.approx(16 / 6),
        "mean_num_draft_tokens": pytest.approx(16 / 6),
        "tokens_per_iteration": pytest.approx(1 + 8 / 6),
        "acceptance_by_position": [0.8333, 0.5, 0.5],
        "marginal_acceptance_by_position": [0.8333, 0.3333, 0.1667],
        "acceptance_histogram": [1, 3, 1, 1],
    }


def test_what_proposed_nothing_counts_where_time_is_concerned_alone() -> None:
    acceptance = Acceptance.of([(0, 0), (2, 1)])
    columns = acceptance.columns()
    assert acceptance.num_iterations == 1
    assert (columns["acceptance_histogram"], columns["mean_proposed"]) == ([0, 1, 0], 2)
    assert (columns["mean_num_draft_tokens"], columns["tokens_per_iteration"]) == (1, 1.5)


def test_nothing_measured_is_none_and_not_zero() -> None:
    assert set(Acceptance().columns().values()) == {None}


def test_sums_are_counts_again() -> None:
    assert Acceptance.of(OUTCOMES[:2]) + Acceptance.of(OUTCOMES[2:]) == Acceptance.of(OUTCOMES)
