"""A text's branch takes the place of the head's nodes that count less, and nothing is drawn twice."""

from __future__ import annotations

import torch

from harness.decoding.trees import TreeProposal, TreeShape
from harness.drafting.hybrid_trees import _TextRecord
from harness.drafting.text_branches import TextBranch, beside, merged
from harness.drafting.tree_plan import best_shape


def test_branches_share_the_nodes_where_they_agree() -> None:
    """The text of the first row goes on from the head's 5; that of the second has no guess."""
    head = TreeProposal(
        torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]), TreeShape([(0, 0, 1, 3), (0, 0, 1, 3)])
    )
    values = [[0.8, 0.1, 0.3, 0.2]] * 2
    found = merged(head, values, [TextBranch([5, 9, 9], 0.5), TextBranch()])
    # 5 counts 0.8; then 7 with 0.3 and the text's 9 with 0.25; 8 with 0.2 before the text's next 9.
    assert found.tokens.tolist() == [[5, 9, 7, 8], [5, 6, 7, 8]]
    assert list(found.shape.parents) == [(0, 1, 1, 3), (0, 0, 1, 3)]
    assert found.probabilities is None


def test_a_branch_comes_before_what_was_drawn_without_its_first_token() -> None:
    """It displaces the drawn nodes that count less than its own."""
    parents = (0, 1, 0, 1)
    values = [0.8, 0.64, 0.3, 0.1]
    probabilities = torch.arange(5.0).view(1, 5, 1).expand(2, -1, -1)
    drawn = TreeProposal(
        torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]]), TreeShape([parents] * 2), probabilities
    )
    found = beside(drawn, values, [TextBranch([7, 8, 9], 0.6), TextBranch()])
    assert found.tokens.tolist() == [[7, 8, 1, 2], [1, 2, 3, 4]]
    assert list(found.shape.parents) == [(0, 1, 0, 3), parents]
    assert found.certain is not None
    assert found.certain.tolist() == [[True, True, False, False], [False] * 4]
    assert found.probabilities is not None
    assert found.probabilities.squeeze(2).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_the_nodes_of_a_static_tree_count_less_and_less() -> None:
    values = best_shape((0.7, 0.2, 0.1), 4, 12).values
    assert list(values) == sorted(values, reverse=True)
    assert best_shape((0.5, 0.25), 2, 3) == ((0, 0, 1), (0.5, 0.25, 0.25))


def test_a_text_that_was_wrong_counts_less() -> None:
    record = _TextRecord()
    before = record.chance
    record.learn([5, 6, 7], [5, 6])  # as far as can be told, it was right
    assert record.chance > before
    record.learn([5, 6, 7], [5, 9])
    record.learn([5, 6, 7], [8])
    assert record.chance < before
    record.learn([], [8])
    assert 0 < record.chance < before
