"""Draft models: token by token, or all tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from harness.local.decoding.iteration import read
from harness.local.decoding.protocols import Proposal, Runner, Step, TensorDrafter, TokenRows
from harness.local.decoding.randomness import existing_index
from harness.local.decoding.state import Column, RowState
from harness.local.decoding.warp import AnyWarp
from harness.local.runners.base import gather_rows
from harness.local.runners.compiled import end_part

# Where a configuration names the mask of a parallel draft, in the order in which vLLM looks for it.
_MASK_KEYS = ("pard_token", "ptd_token_id")


class ModelDrafter(TensorDrafter):
    """Proposes by running a draft model, token by token.

    The runner's cache lacks the last two tokens of each row, its tail, with which every proposal begins. Say the text
    ends with `a x`, and b, c and d are drawn: `a x` and b and c were fed, but never d itself. Whatever is accepted,
    the cache then keeps one token more than that, and lacks the last two again:

        accepted b, then y         the cache has `a x`, and lacks `b y`
        accepted b, c, d, then y   the cache has `a x b c`, and lacks `d y`

    Args:
        runner: of the draft model.
        warp: also applied to the target's logits.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp) -> None:
        self.runner = runner
        self.warp = warp
        self._has_rows = False

    def clear(self) -> None:
        self._has_rows = False

    def zero_nan(self) -> None:
        self.runner.zero_nan()

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        self._read([prompt[:-1] for prompt in prompts])

    def _read(self, prompts: TokenRows) -> None:
        read_prompts = self.runner.add if self._has_rows else self.runner.start
        self._device = read_prompts(prompts).logits.device
        self._has_rows = True

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        tail = [rows.numbers[Column.PREVIOUS], rows.numbers[Column.LAST]]
        tokens = torch.stack(tail, 1).to(self._device)
        first = rows.numbers[Column.LENGTH].to(self._device) - 1
        # The second pass begins behind the tail.
        starts = [first + (number + 1 if number else 0) for number in range(uniforms.shape[1])]
        drawn: list[Tensor] = []
        distributions: list[Tensor] = []
        for start, numbers in zip(starts, uniforms.to(self._device).split(1, dim=1), strict=True):
            logits = read(self.runner, rows, tokens, start).logits
            probabilities = self.warp(logits[:, -1])
            tokens = existing_index(probabilities, numbers)
            drawn.append(tokens)
            distributions.append(probabilities)
            end_part()
        device = rows.numbers.device
        # Proposals are returned on the target's device.
        return Proposal(torch.cat(drawn, 1).to(device), torch.stack(distributions, 1).to(device))

    def keep(self, counts: Sequence[int]) -> None:
        self.runner.keep(counts)

    def select(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)


class ParallelDrafter(ModelDrafter):
    """Proposes by one pass of a parallel draft model (PARD, An et al. 2025, arXiv:2504.18583).

    It was trained with a mask token in place of tokens that are not known yet. For K = 3 it reads the
    text `a b` and two masks, and predicts the next three tokens after b, after the first mask and
    after the second. Each is drawn without knowing the others.

    The cache lacks the tokens that the last verdict decided. They are read with the masks, which the next tokens
    overwrite.

    Args:
        mask: stands for a token that is not known yet.
    """

    def __init__(self, runner: Runner, warp: AnyWarp, mask: int) -> None:
        super().__init__(runner, warp)
        self._mask = mask
        # Tokens of each row that the cache lacks, as the host knows them.
        self._num_unread: list[int] = []

    def clear(self) -> None:
        super().clear()
        self._num_unread = []

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        self._read(prompts)
        self._num_unread += [1] * len(prompts)

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self._device)
        num_rows, num_draft_tokens = uniforms.shape
        unread = rows.decided.to(self._device)
        if not rows.is_fixed:
            unread = unread[:, : max(self._num_unread)]
        # A row that only fills the batch up reads a token, too.
        counts = rows.numbers[Column.GAINED].to(self._device).clamp(min=1)
        masks = counts.new_full((num_rows, num_draft_tokens - 1), self._mask)
        tokens = torch.cat([unread, masks], 1)
        places = torch.arange(tokens.shape[1], device=self._device)
        tokens = tokens.where(places < counts.unsqueeze(1), self._mask)
        starts = rows.numbers[Column.LENGTH].to(self._device) + 1 - counts
        logits = read(self.runner, rows, tokens, starts).logits
        ahead = torch.arange(num_draft_tokens, device=self._device)
        probabilities = self.warp(gather_rows(logits, counts.unsqueeze(1) - 1 + ahead))
        drawn = existing_index(probabilities, uniforms)
        device = rows.numbers.device
        return Proposal(drawn.to(device), probabilities.to(device))

    def keep(self, counts: Sequence[int]) -> None:
        self.runner.keep(self._num_unread)
        self._num_unread = list(counts)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._num_unread = [self._num_unread[row] for row in rows]


def widths(config: PreTrainedConfig, num_draft_tokens: int) -> list[int]:
    """Return the widths of a draft model's passes, in tokens, over fixed rows.

    A parallel draft reads up to K + 1 decided tokens with K - 1 masks.
    """
    return [1, 2] if mask_token(config) is None else [max(1, 2 * num_draft_tokens)]


def mask_token(config: PreTrainedConfig) -> int | None:
    """Return the mask that a draft model was trained with; None if it drafts token by token."""
    for key in _MASK_KEYS:
        token = getattr(config, key, None)
        if token is not None:
            return token
    return None
