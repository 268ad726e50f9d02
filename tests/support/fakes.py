"""A runner whose model is a table, where the distribution after a token depends on that token alone; and a drafter
that looks tokens up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.local.decoding.state import Starts


class MarkovRunner(Runner):
    """A `Runner` over transition probabilities [V, V].

    Its hidden states [.., 1, 2] are each position and its token.
    """

    def __init__(self, transitions: Tensor) -> None:
        self._logits = transitions.log()
        self.rows: list[list[int]] = []
        self.num_calls = 0

    def start(
        self, prompts: Sequence[Sequence[int]], num_slots: int = 0, *, alone: bool = False
    ) -> Step:
        self.rows = [list(prompt) for prompt in prompts]
        width = max(map(len, prompts))
        last = torch.tensor([row[-1] if row else 0 for row in self.rows])
        return Step(self._logits[last], self._hidden(width))

    def extend(self, tokens: Tensor, starts: Starts, *, goes_on: bool = False) -> Step:
        self.num_calls += 1
        for row, new, start in zip(self.rows, tokens.tolist(), starts, strict=True):
            if start is not None:
                assert start == len(row) or not goes_on
                assert start <= len(row)
                del row[start:]
            row += new
        return Step(self._logits[tokens], self._hidden(tokens.shape[1]))

    def _hidden(self, count: int) -> Tensor:
        """Hidden states of each row's last `count` tokens; before the first one there is (-1, -1)."""
        seen = [[(-1, -1)] * count + list(enumerate(row)) for row in self.rows]
        return torch.tensor([pairs[-count:] for pairs in seen]).unsqueeze(2)


class TableDrafter(Drafter):
    """Deterministic: proposes what a table says follows each token, as far as it says anything.

    It follows the target's hidden states, which must tell it the same sequences as the verdicts do.
    """

    layers = (0,)

    def __init__(self, following: dict[int, int]) -> None:
        self._following = following
        self.rows: list[list[int]] = []
        self.num_offered: list[int] = []

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self.rows = [[*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        for states, prompt in zip(step.hidden[:, :, 0].tolist(), prompts, strict=True):
            assert states[-len(prompt) :] == [list(pair) for pair in enumerate(prompt)]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        assert uniforms.shape == (len(self.rows), num_draft_tokens)
        offered: list[list[int]] = []
        for row in self.rows:
            tokens: list[int] = []
            while (
                len(tokens) < num_draft_tokens and (last := [*row, *tokens][-1]) in self._following
            ):
                tokens.append(self._following[last])
            offered.append(tokens)
        lengths = list(map(len, offered))
        self.num_offered += lengths
        padded = [tokens + [0] * (num_draft_tokens - len(tokens)) for tokens in offered]
        return Proposal(torch.tensor(padded), None, lengths)

    def observe(
        self, num_accepted: Sequence[int], decided: Sequence[Sequence[int]], step: Step
    ) -> None:
        hidden = step.hidden[:, :, 0].tolist()
        for row, count, tokens, states in zip(
            self.rows, num_accepted, decided, hidden, strict=True
        ):
            for (position, read), token in zip(states[1 : count + 1], tokens, strict=False):
                assert (position, read) == (len(row), token)
                row.append(token)
            row += tokens[count:]
