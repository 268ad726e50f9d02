"""A text's proposal and a head's verified in one tree, within one budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Proposal, Step, TreeDrafter
from harness.decoding.trees import TreeProposal
from harness.drafting.beside_text import BesideText
from harness.drafting.head_trees import HeadTrees
from harness.drafting.text import TextDrafter
from harness.drafting.text_branches import TextBranch

# What is known of a text before its first proposal: as if this many tokens of such texts had been
# right and wrong. Of what is learned the earlier counts less and less.
_RIGHT_BEFORE = 4.0
_WRONG_BEFORE = 1.0
_MEMORY = 0.8


class _TextRecord:
    """How often the tokens of a row's text were right of late."""

    def __init__(self) -> None:
        self._num_right = _RIGHT_BEFORE
        self._num_wrong = _WRONG_BEFORE

    @property
    def chance(self) -> float:
        """That a token is right, if those before it are."""
        return self._num_right / (self._num_right + self._num_wrong)

    def learn(self, proposed: Sequence[int], decided: Sequence[int]) -> None:
        """Compare what a text said with what followed it."""
        num_compared = min(len(proposed), len(decided))
        num_right = 0
        while num_right < num_compared and proposed[num_right] == decided[num_right]:
            num_right += 1
        self._num_right = _MEMORY * self._num_right + num_right
        self._num_wrong = _MEMORY * self._num_wrong + (num_right < num_compared)


class HybridTreeDrafter(BesideText[_TextRecord, HeadTrees], TreeDrafter):
    """Proposes trees of a head, with a branch of what the row's text says.

    The branch depends on the row's tokens alone, and so does the number of nodes that it takes from
    the head: see `text_branches` for the trees and `tree_rules.verify_rounds` for why they are
    lossless.

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
        """See `Drafter.propose`: a chain of the head."""
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
        self._proposed = self._proposed.gather(1, path - 1)
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
