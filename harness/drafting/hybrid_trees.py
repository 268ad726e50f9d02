"""Hybrids with trees (`draft=suffix+tiny_eagle3 draft.tree=dynamic`): what a row's text says is a
branch of the tree that the head drafts, within the same budget.

`hybrid` is the one without trees, which chooses between the text and the head in each iteration.
`text_branches` joins the branch with the head's tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Proposal, Step, TreeDrafter
from harness.decoding.trees import TreeProposal, tokens_on
from harness.drafting.beside_text import BesideText
from harness.drafting.head_trees import HeadTrees
from harness.drafting.text import TextDrafter
from harness.drafting.text_branches import TextBranch

# A text begins as if this many of its tokens had been right and wrong.
_RIGHT_BEFORE = 4.0
_WRONG_BEFORE = 1.0
# How much of both counts is left after each further proposal.
_MEMORY = 0.8


class _TextRecord:
    """How often the tokens of a row's text were right of late.

    The chance begins at 4 / (4 + 1) = 0.8. After a proposal of three tokens, of which two were
    right, the counts are 0.8 * 4 + 2 = 5.2 and 0.8 * 1 + 1 = 1.8, and the chance is 0.74.
    """

    def __init__(self) -> None:
        self._num_right = _RIGHT_BEFORE
        self._num_wrong = _WRONG_BEFORE

    @property
    def chance(self) -> float:
        """The chance that a token is right, if those before it are."""
        return self._num_right / (self._num_right + self._num_wrong)

    def learn(self, proposed: Sequence[int], decided: Sequence[int]) -> None:
        """Compare what a text said with the tokens that were decided; either may be longer."""
        num_compared = min(len(proposed), len(decided))
        num_right = 0
        while num_right < num_compared and proposed[num_right] == decided[num_right]:
            num_right += 1
        self._num_right = _MEMORY * self._num_right + num_right
        self._num_wrong = _MEMORY * self._num_wrong + (num_right < num_compared)


class HybridTreeDrafter(BesideText[_TextRecord, HeadTrees], TreeDrafter):
    """Proposes trees of a head, with a branch of what the row's text says.

    The branch, and how many nodes it takes from the head, depend on the row's own past alone. So
    the trees stay lossless.

    Args:
        text: proposes the branches.
        other: drafts the trees.
        least: the tokens that a text must offer.
    """

    def __init__(self, text: TextDrafter, other: HeadTrees, least: int) -> None:
        super().__init__(text, other, least, _TextRecord)

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._branches: list[TextBranch] = []  # of the last proposal; empty without one
        self._proposed = torch.empty(0)
        super().start(prompts, first_tokens, step)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """A chain of the head."""
        return self.other.propose(num_draft_tokens, uniforms)

    def propose_tree(self, depth: int, limits: Sequence[int], uniforms: Tensor) -> TreeProposal:
        found = self._text.propose(depth, uniforms)
        assert found.lengths is not None
        self._branches = [
            TextBranch(tokens[:length], record.chance)
            for tokens, length, record in zip(
                found.tokens.tolist(), found.lengths, self._records, strict=True
            )
        ]
        proposal = self.other.propose_tree(depth, limits, uniforms, self._branches)
        self._proposed = proposal.tokens
        return proposal

    def follow(self, path: Tensor) -> None:
        self._proposed = tokens_on(path, self._proposed)
        self._text.replace(self._proposed)
        self.other.follow(path)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if self._branches:
            rows = zip(
                self._records,
                self._branches,
                self._proposed.tolist(),
                num_accepted,
                next_tokens,
                strict=True,
            )
            for record, branch, path, count, following in rows:
                record.learn(branch.tokens, [*path[:count], following])
        self._branches = []
        super().observe(num_accepted, next_tokens, step)
