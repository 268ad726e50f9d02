"""Drafters: where proposals come from. A draft model is the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Proposal, Runner
from harness.decoding.randomness import inverse_cdf
from harness.decoding.transfer import to_device
from harness.decoding.warp import Warp

# tokens [B, n], uniforms [B, K], warp -> tokens [B, K] drawn behind them, and their distributions [B, K, V].
Draw = Callable[[Tensor, Tensor, Warp], tuple[Tensor, Tensor]]


def draw(extend: Callable[[Tensor], Tensor], tokens: Tensor, uniforms: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
    """Draw K tokens a row behind tokens [B, n], one after the other; nothing here waits for the device.

    Args:
        extend: as `Runner.extend`.
        uniforms: [B, K], the random numbers to draw with.

    Returns:
        tokens [B, K], and the distributions [B, K, V] they were drawn from.
    """
    drawn: list[Tensor] = []
    probabilities: list[Tensor] = []
    for position in range(uniforms.shape[1]):
        probabilities.append(warp(extend(tokens)[:, -1]))
        drawn.append(inverse_cdf(probabilities[-1], uniforms[:, position]))
        tokens = drawn[-1].unsqueeze(1)
    return torch.stack(drawn, dim=1), torch.stack(probabilities, dim=1)


class ModelDrafter:
    """Proposes by running a draft model token by token.

    The runner's cache trails the decided sequence by one token or by two (the last draft token was never fed to the
    draft model itself; it is missing where all K were accepted). To keep the batch rectangular, all rows trail by two
    as soon as one does: the others give one cached token back and feed it again.

    Args:
        runner: of the draft model.
        warp: the same one the target's logits go through.
        device: where proposals are wanted, the target's.
        draw: a faster way to run the K steps on the same runner, where it has one.
    """

    def __init__(
        self, runner: Runner, warp: Warp, device: torch.device | str = "cpu", draw: Draw | None = None
    ) -> None:
        self._runner = runner
        self._draw = draw
        self._warp = warp
        self._device = device
        self._unseen = torch.empty(0)  # [B, 1 or 2] decided tokens that the runner has not been fed
        self._proposed = torch.empty(0)  # [B, K]

    def start(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int]) -> None:
        logits = self._runner.start(prompts)
        self._unseen = to_device(first_tokens, logits.device).unsqueeze(1)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self._unseen.device)
        if self._draw is None:
            self._proposed, probabilities = draw(self._runner.extend, self._unseen, uniforms, self._warp)
        else:
            self._proposed, probabilities = self._draw(self._unseen, uniforms, self._warp)
        return Proposal(self._proposed.to(self._device), probabilities.to(self._device))

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        device = self._unseen.device
        num_unseen, num_proposed = self._unseen.shape[1], self._proposed.shape[1]
        next_token = to_device(next_tokens, device).unsqueeze(1)
        if max(num_accepted) < num_proposed:
            self._runner.keep([num_unseen + count for count in num_accepted])
            self._unseen = next_token
            return
        self._runner.keep([num_unseen + count - 1 for count in num_accepted])
        fed = torch.cat([self._unseen[:, -1:], self._proposed], dim=1)
        before_next = fed.gather(1, to_device(num_accepted, device).unsqueeze(1))
        self._unseen = torch.cat([before_next, next_token], dim=1)

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        self._unseen = self._unseen[to_device(rows, self._unseen.device)]
