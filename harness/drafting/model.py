"""A draft model as drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.decoding.transfer import Arriving, added, to_device
from harness.decoding.warp import AnyWarp


class ModelDrafter(Drafter):
    """Proposes by running a draft model token by token.

    The runner's cache trails the decided sequence by one token or by two (the last draft token was never fed to the
    draft model itself; it is missing where all K were accepted). To keep the batch rectangular, all rows trail by two
    as soon as one does, or may while the host has not read the verdict: the others give one cached token back and feed
    it again. Tokens that were decided without a proposal are fed with the next one.

    `warp` is the one applied to the target's logits; `device` is the target's, where proposals are used.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp, device: torch.device | str = "cpu") -> None:
        self._runner = runner
        self._warp = warp
        self._device = device
        self._unseen = torch.empty(
            0
        )  # [B, at least 1] decided tokens that the runner has not been fed
        self._proposed = torch.empty(0)  # [B, K]

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        logits = self._runner.start(prompts).logits
        self._unseen = to_device(first_tokens, logits.device).unsqueeze(1)
        self._proposed = self._unseen[:, :0]

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        if (missing := self._unseen.shape[1] - 1) > 0:  # new rows trail by one
            self._runner.extend(self._unseen[:, :-1])
            self._runner.keep([missing] * len(self._unseen))
        self._runner.add(prompts)
        new = to_device(first_tokens, self._unseen.device).unsqueeze(1)
        self._unseen = torch.cat([self._unseen[:, -1:], new])
        self._proposed = self._unseen[:, :0]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self._unseen.device)
        self._proposed, probabilities = self._runner.draw(self._unseen, uniforms, self._warp)
        return Proposal(self._proposed.to(self._device), probabilities.to(self._device))

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        device = self._unseen.device
        num_unseen, num_proposed = self._unseen.shape[1], self._proposed.shape[1]
        next_token = to_device(next_tokens, device).unsqueeze(1)
        if not num_proposed:
            self._unseen = torch.cat([self._unseen, next_token], dim=1)
            return
        proposed, self._proposed = self._proposed, self._proposed[:, :0]
        if not isinstance(num_accepted, Arriving) and max(num_accepted) < num_proposed:
            self._runner.keep(added(num_accepted, num_unseen))
            self._unseen = next_token
            return
        self._runner.keep(added(num_accepted, num_unseen - 1))
        fed = torch.cat([self._unseen[:, -1:], proposed], dim=1)
        before_next = fed.gather(1, to_device(num_accepted, device).unsqueeze(1))
        self._unseen = torch.cat([before_next, next_token], dim=1)

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        index = to_device(rows, self._unseen.device)
        self._unseen, self._proposed = self._unseen[index], self._proposed[index]
