"""Two drafters in one: a text proposes where it is confident, a head or a draft model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, FollowingDrafter, Proposal, Step
from harness.decoding.transfer import to_device
from harness.drafting.head_drafter import HeadDrafter
from harness.drafting.text import TextDrafter
from harness.runners.graphs import filled_up


class HybridDrafter(Drafter):
    """Chooses between two proposals, row by row and in every iteration.

    The choice depends on nothing but the decided tokens of the row, and a token of the text is
    certain: the distribution that it was drawn from has all its weight there. So verification is as
    lossless as for either drafter alone. The model does not run while all rows have a text's
    proposal; it reads the tokens when it next proposes.

    Args:
        text: proposes in rows whose text has enough tokens.
        other: proposes in all other rows.
        least: how many tokens are enough.
    """

    reads_verdicts = True

    def __init__(self, text: TextDrafter, other: FollowingDrafter, least: int) -> None:
        text.least = least
        self._text = text
        self.other = other
        self.layers = tuple(other.layers)

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        """See `Drafter.start`."""
        self._text.start(prompts, first_tokens, step)
        self.other.start(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        """See `Drafter.add`."""
        self._text.add(prompts, first_tokens, step)
        self.other.add(prompts, first_tokens, step)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        found = self._text.propose(num_draft_tokens, uniforms)
        assert found.lengths is not None
        replaced = [length > 0 for length in found.lengths]
        if all(replaced):
            self.other.replace(found.tokens, replaced)
            return found
        proposal = self.other.propose(num_draft_tokens, uniforms)
        if any(replaced):
            proposal = _mixed(found, proposal, replaced)
            self.other.replace(proposal.tokens, replaced)
        self._text.replace(proposal.tokens)
        return proposal

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        """See `Drafter.observe`."""
        self._text.observe(num_accepted, next_tokens, step)
        self.other.observe(num_accepted, next_tokens, step)

    def select(self, rows: Sequence[int]) -> None:
        """See `Drafter.select`."""
        self._text.select(rows)
        self.other.select(rows)


def part_with_head(drafter: Drafter) -> HeadDrafter | None:
    """The drafter itself or the part of a hybrid that drafts with a head; None where none does."""
    part = drafter.other if isinstance(drafter, HybridDrafter) else drafter
    return part if isinstance(part, HeadDrafter) else None


def _mixed(found: Proposal, drafted: Proposal, replaced: Sequence[bool]) -> Proposal:
    """The proposal that has the rows `replaced` of `found`, and the others of `drafted`."""
    assert found.lengths is not None
    assert drafted.probabilities is not None
    device = drafted.tokens.device
    num_rows, width = drafted.tokens.shape
    longest = max(width, found.tokens.shape[1])
    # All rows are computed and then chosen from: picking some would wait for the device.
    is_replaced = to_device([int(row) for row in replaced], device).unsqueeze(1) > 0
    is_certain = is_replaced | (torch.arange(longest, device=device) >= width)
    of_text = filled_up(found.tokens.to(device), num_rows, longest)
    tokens = torch.where(is_certain, of_text, filled_up(drafted.tokens, num_rows, longest))
    drawn_from = filled_up(drafted.probabilities, num_rows, longest)
    certain = torch.zeros_like(drawn_from).scatter_(2, tokens.unsqueeze(2), 1.0)
    probabilities = torch.where(is_certain.unsqueeze(2), certain, drawn_from)
    offered = [width] * len(replaced) if drafted.lengths is None else drafted.lengths
    lengths = [length or other for length, other in zip(found.lengths, offered, strict=True)]
    return Proposal(tokens, probabilities, lengths)
