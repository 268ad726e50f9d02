"""Two drafters in one: a text proposes where it is confident, a head or a draft model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, FollowingDrafter, Proposal, Step
from harness.drafting.text import TextDrafter


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
        self._vocabulary_size = step.logits.shape[-1]
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
            proposal = _mixed(found, proposal, replaced, self._vocabulary_size)
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


def _mixed(
    found: Proposal, drafted: Proposal, replaced: Sequence[bool], vocabulary_size: int
) -> Proposal:
    """The proposal that has the rows `replaced` of `found`, and the others of `drafted`."""
    assert found.lengths is not None
    assert drafted.probabilities is not None
    device = drafted.tokens.device
    width = drafted.tokens.shape[1]
    longest = max(width, found.tokens.shape[1])
    of_text = torch.tensor(replaced, device=device)
    tokens = drafted.tokens.new_zeros(len(replaced), longest)
    tokens[:, : found.tokens.shape[1]] = found.tokens.to(device)
    tokens[~of_text] = 0
    own = tokens[:, :width]
    own[~of_text] = drafted.tokens[~of_text]
    certain = torch.nn.functional.one_hot(tokens, vocabulary_size)
    probabilities = certain.to(drafted.probabilities.dtype)
    probabilities[:, :width][~of_text] = drafted.probabilities[~of_text]
    offered = [width] * len(replaced) if drafted.lengths is None else drafted.lengths
    lengths = [length or other for length, other in zip(found.lengths, offered, strict=True)]
    return Proposal(tokens, probabilities, lengths)
