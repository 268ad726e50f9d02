"""A draft model as drafter: token by token, with the target's tokenizer.

`parallel` drafts all tokens in one pass, and `translated` has another tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.local.decoding.transfer import to_device
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.teacher_forcing import own_probabilities


class ModelDrafter(Drafter):
    """Proposes by running a draft model token by token.

    The runner's cache lacks the last tokens of the text, `_unseen`, with which the next proposal
    begins. Say it was fed `a`, and drew b, c and d. To draw d it was fed b and c, but never d
    itself:

        accepted b, then x         the cache keeps `a b`, and lacks `x`
        accepted b, c, d, then x   the cache keeps `a b c`, and lacks `d x`

    To keep the batch rectangular, all rows lack two tokens as soon as one does. The other rows give a cached token
    back: the first one then lacks `b x`. Tokens that were decided without a proposal are unseen, too.

    Args:
        runner: the draft model's.
        warp: the one applied to the target's logits.
        device: the target's, where proposals are used.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp, device: torch.device | str = "cpu") -> None:
        self._runner = runner
        self._warp = warp
        self._device = device
        # [B, at least 1] decided tokens that the runner has not been fed.
        self._unseen = torch.empty(0)
        # The runner's own proposal [B, K], until its verdict.
        self._proposed = torch.empty(0)

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        logits = self._runner.start(prompts).logits
        self._unseen = to_device(first_tokens, logits.device).unsqueeze(1)
        self._forget_proposal()

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        # New rows lack one token, so all others must.
        num_rows, num_unseen = self._unseen.shape
        if num_unseen > 1:
            self._runner.extend(self._unseen[:, :-1])
            self._runner.keep([num_unseen - 1] * num_rows)
        self._runner.add(prompts)
        new = to_device(first_tokens, self._unseen.device).unsqueeze(1)
        self._unseen = torch.cat([self._unseen[:, -1:], new])
        self._forget_proposal()

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self._unseen.device)
        self._proposed, probabilities = self._runner.draw(self._unseen, uniforms, self._warp)
        return Proposal(self._proposed.to(self._device), probabilities.to(self._device))

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        device = self._unseen.device
        num_unseen = self._unseen.shape[1]
        num_proposed = self._proposed.shape[1]
        next_token = to_device(next_tokens, device).unsqueeze(1)
        if num_proposed == 0:
            self._unseen = torch.cat([self._unseen, next_token], dim=1)
            return
        if max(num_accepted) < num_proposed:
            # The runner was fed all tokens that were accepted.
            self._runner.keep([num_unseen + count for count in num_accepted])
            self._unseen = next_token
        else:
            self._runner.keep([num_unseen - 1 + count for count in num_accepted])
            # All are seen but the last accepted token and the next one.
            text = torch.cat([self._unseen[:, -1:], self._proposed], dim=1)
            places = to_device(num_accepted, device).unsqueeze(1)
            self._unseen = torch.cat([text.gather(1, places), next_token], dim=1)
        self._forget_proposal()

    def along(self, tokens: Sequence[int], answer: range) -> Tensor:
        """Return the probabilities [len(answer) - 1] of an answer's tokens but the first, in one pass over the text.

        Args:
            tokens: all tokens, of prompt and answer.
            answer: the answer's places in `tokens`.
        """
        wanted = {place: tokens[place + 1] for place in answer[:-1]}
        return own_probabilities(self._runner, self._warp, tokens, wanted)

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        index = to_device(rows, self._unseen.device)
        self._unseen = self._unseen[index]
        self._proposed = self._proposed[index]

    def _forget_proposal(self) -> None:
        self._proposed = self._unseen[:, :0]
