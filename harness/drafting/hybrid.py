"""Hybrids (`draft=suffix+tiny_eagle3`): in each iteration and row either the text proposes, or a
head or a draft model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, FollowingDrafter, Proposal, Step
from harness.decoding.transfer import to_device
from harness.drafting.heads.drafter import HeadDrafter
from harness.drafting.text import TextDrafter
from harness.runners.sizes import filled_up

# The weight of the latest proposal in the moving mean of the tokens that a row accepts of a drafter.
# It is larger for a text, which proposes less often.
_WEIGHT_OF_TEXT = 1 / 2
_WEIGHT_OF_OTHER = 1 / 4

# A text that did worse is tried again after it has been skipped this many times.
_MOST_SKIPPED = 8


class _RowRecord:
    """How many tokens a row accepted of late, of each drafter's proposals.

    A mean that is not known yet is infinite: the text proposes first, and the other one next.
    """

    def __init__(self) -> None:
        self._of_text = math.inf
        self._of_other = math.inf
        self._num_skipped = 0

    def prefers_text(self) -> bool:
        """Return whether the text is to propose, in a turn in which it can; skip it otherwise."""
        if self._of_text >= self._of_other or self._num_skipped == _MOST_SKIPPED:
            self._num_skipped = 0
            return True
        self._num_skipped += 1
        return False

    def learn(self, num_accepted: int, *, is_of_text: bool) -> None:
        """Learn how many tokens of a proposal were accepted."""
        if is_of_text:
            self._of_text = _moving_mean(self._of_text, num_accepted, _WEIGHT_OF_TEXT)
        else:
            self._of_other = _moving_mean(self._of_other, num_accepted, _WEIGHT_OF_OTHER)


def _moving_mean(mean: float, latest: int, weight: float) -> float:
    return latest if math.isinf(mean) else mean + weight * (latest - mean)


class HybridDrafter(Drafter):
    """Chooses between two proposals, row by row and in every iteration.

    Both drafters follow all rows, whichever of them proposes. `observe` says how many tokens of a
    proposal were kept, not which: so each of the two learns before it, by `replace`, what was
    proposed in the end.

    The choice depends on nothing but the row's past: its tokens, and how many tokens of either
    drafter it accepted. A token of the text is certain: the distribution that it was drawn from has
    all its weight there. So verification is as lossless as for either drafter alone. The model does
    not run while all rows have a text's proposal; it reads the tokens when it next proposes.

    Args:
        text: proposes in rows whose text has enough tokens, and did not do worse there of late.
        other: proposes in all other rows.
        least: how many tokens a text must offer.
    """

    reads_verdicts = True  # as every text does

    def __init__(self, text: TextDrafter, other: FollowingDrafter, least: int) -> None:
        text.least = least
        self.text = text
        self.other = other
        self.layers = tuple(other.layers)

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._replaced: list[bool] = []  # of the last proposal; empty without one
        self._records = [_RowRecord() for _ in prompts]
        self.text.start(prompts, first_tokens, step)
        self.other.start(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._records += [_RowRecord() for _ in prompts]
        self.text.add(prompts, first_tokens, step)
        self.other.add(prompts, first_tokens, step)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        from_text = self.text.propose(num_draft_tokens, uniforms)
        assert from_text.lengths is not None
        replaced = [
            length > 0 and record.prefers_text()
            for length, record in zip(from_text.lengths, self._records, strict=True)
        ]
        self._replaced = replaced
        if all(replaced):
            self.other.replace(from_text.tokens, replaced)
            return from_text
        proposal = self.other.propose(num_draft_tokens, uniforms)
        if any(replaced):
            proposal = _mixed(from_text, proposal, replaced)
            self.other.replace(proposal.tokens, replaced)
        self.text.replace(proposal.tokens)
        return proposal

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if self._replaced:
            for record, count, is_of_text in zip(
                self._records, num_accepted, self._replaced, strict=True
            ):
                record.learn(count, is_of_text=is_of_text)
        self._replaced = []
        self.text.observe(num_accepted, next_tokens, step)
        self.other.observe(num_accepted, next_tokens, step)

    def select(self, rows: Sequence[int]) -> None:
        self._records = [self._records[row] for row in rows]
        self.text.select(rows)
        self.other.select(rows)


def part_with_head(drafter: Drafter) -> HeadDrafter | None:
    """Return the drafter, or the part of a hybrid, that drafts with a head; None where none
    does.
    """
    part = drafter.other if isinstance(drafter, HybridDrafter) else drafter
    return part if isinstance(part, HeadDrafter) else None


def _mixed(from_text: Proposal, drafted: Proposal, replaced: Sequence[bool]) -> Proposal:
    """Return the proposal that has the rows `replaced` from the text, and the others as drafted.

    A row of the text gets distributions that have all their weight on its tokens.
    """
    assert from_text.lengths is not None
    assert drafted.probabilities is not None
    device = drafted.tokens.device
    num_rows, width = drafted.tokens.shape
    longest = max(width, from_text.tokens.shape[1])
    # All rows are computed and then chosen from: picking some would wait for the device.
    is_text = to_device([int(row) for row in replaced], device).unsqueeze(1) > 0
    is_certain = is_text | (torch.arange(longest, device=device) >= width)
    text_tokens = filled_up(from_text.tokens.to(device), num_rows, longest)
    tokens = torch.where(is_certain, text_tokens, filled_up(drafted.tokens, num_rows, longest))
    drawn_from = filled_up(drafted.probabilities, num_rows, longest)
    certain = torch.zeros_like(drawn_from).scatter_(2, tokens.unsqueeze(2), 1.0)
    probabilities = torch.where(is_certain.unsqueeze(2), certain, drawn_from)
    offered = [width] * len(replaced) if drafted.lengths is None else drafted.lengths
    lengths = [
        of_text if is_replaced else of_other
        for of_text, of_other, is_replaced in zip(from_text.lengths, offered, replaced, strict=True)
    ]
    return Proposal(tokens, probabilities, lengths)
