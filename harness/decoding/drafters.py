"""Drafters: where proposals come from. A draft model is the first of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Proposal, Runner
from harness.decoding.randomness import inverse_cdf
from harness.decoding.warp import Warp


class ModelDrafter:
    """Proposes by running a draft model token by token.

    The runner's cache trails the decided sequence by one token or by two (the last draft token was never fed to the
    draft model itself; it is missing where all K were accepted). To keep the batch rectangular, all rows trail by two
    as soon as one does: the others give one cached token back and feed it again.

    Args:
        runner: of the draft model.
        warp: the same one the target's logits go through.
        device: where proposals are wanted, the target's.
    """

    def __init__(self, runner: Runner, warp: Warp, device: torch.device | str = "cpu") -> None:
        self._runner = runner
        self._warp = warp
        self._device = device
        self._unseen = torch.empty(0)  # [B, 1 or 2] decided tokens that the runner has not been fed
        self._proposed = torch.empty(0)  # [B, K]

    def start(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int]) -> None:
        logits = self._runner.start(prompts)
        self._unseen = torch.tensor(first_tokens, device=logits.device).unsqueeze(1)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self._unseen.device)
        tokens: list[Tensor] = []
        probabilities: list[Tensor] = []
        fed = self._unseen
        for position in range(num_draft_tokens):
            probabilities.append(self._warp(self._runner.extend(fed)[:, -1]))
            tokens.append(inverse_cdf(probabilities[-1], uniforms[:, position]))
            fed = tokens[-1].unsqueeze(1)
        self._proposed = torch.stack(tokens, dim=1)
        return Proposal(self._proposed.to(self._device), torch.stack(probabilities, dim=1).to(self._device))

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        device = self._unseen.device
        num_unseen, num_proposed = self._unseen.shape[1], self._proposed.shape[1]
        next_token = torch.tensor(next_tokens, device=device).unsqueeze(1)
        if max(num_accepted) < num_proposed:
            self._runner.keep([num_unseen + count for count in num_accepted])
            self._unseen = next_token
            return
        self._runner.keep([num_unseen + count - 1 for count in num_accepted])
        fed = torch.cat([self._unseen[:, -1:], self._proposed], dim=1)
        before_next = fed.gather(1, torch.tensor(num_accepted, device=device).unsqueeze(1))
        self._unseen = torch.cat([before_next, next_token], dim=1)

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        self._unseen = self._unseen[list(rows)]
