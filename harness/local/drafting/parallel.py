"""PARD (An et al. 2025, arXiv:2504.18583): a draft model that drafts all tokens in one pass.

It was trained with a mask token in place of tokens that are not known yet. For K = 3 it reads the
text `a b` and two masks, and predicts the next three tokens after b, after the first mask and after
the second. Each is drawn without knowing the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from harness.config.errors import SettingError
from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.local.decoding.randomness import existing_index
from harness.local.decoding.transfer import decided_tokens, to_device
from harness.local.decoding.warp import AnyWarp
from harness.local.runners.sizes import filled_up

# Where a configuration names the mask, in the order in which vLLM looks for it.
_KEYS = ("pard_token", "ptd_token_id")


def mask_token(config: PreTrainedConfig) -> int | None:
    """Return the mask that a draft model was trained with; None if it drafts token by token."""
    for key in _KEYS:
        token = getattr(config, key, None)
        if token is not None:
            return token
    return None


def checked_mask(name: str, config: PreTrainedConfig) -> int | None:
    """Return the mask of a draft as `mask_token` does.

    Raises:
        SettingError: for a mask that is not in the draft's vocabulary.
    """
    mask: Any = mask_token(config)
    size = config.get_text_config(decoder=True).vocab_size
    if mask is not None and not (type(mask) is int and 0 <= mask < size):
        rule = f"has a config.json whose mask token, {mask}, is not in its vocabulary of {size}"
        raise SettingError("draft", rule, name)
    return mask


class ParallelDrafter(Drafter):
    """Proposes by one pass of a parallel draft model.

    A pass reads the tokens that were decided since the last one, and masks. The masks are dropped
    from the cache at once, so that nothing has to be taken back after a verdict.

    Args:
        runner: the draft model's.
        warp: the one applied to the target's logits.
        mask: the token that stands for those not known yet.
        device: the target's, where proposals are used.
    """

    layers = ()

    def __init__(
        self, runner: Runner, warp: AnyWarp, mask: int, device: torch.device | str = "cpu"
    ) -> None:
        self._runner = runner
        self._warp = warp
        self._mask = mask
        self._device = device
        # Tokens [B, n], of which the first `_num_unseen` of each row are decided and unread.
        self._unseen = torch.empty(0)
        self._num_unseen: Sequence[int] = []
        self._proposed = torch.empty(0)

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        device = self._runner.start(prompts).logits.device
        self._unseen = to_device(first_tokens, device).unsqueeze(1)
        self._num_unseen = [1] * len(prompts)
        self._proposed = self._unseen[:, :0]

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._runner.add(prompts)
        new = to_device(first_tokens, self._unseen.device).unsqueeze(1)
        num_before, num_unseen = self._unseen.shape
        width = max(1, num_unseen)
        before = filled_up(self._unseen, num_before, width)
        self._unseen = torch.cat([before, filled_up(new, len(new), width)])
        self._num_unseen = [*self._num_unseen, *[1] * len(prompts)]
        self._proposed = self._unseen[:, :0]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        counts = self._num_unseen
        logits = self._runner.extend(self._with_masks(num_draft_tokens - 1)).logits
        self._runner.keep(counts)
        device = logits.device
        last = to_device(counts, device).unsqueeze(1) - 1
        places = last + torch.arange(num_draft_tokens, device=device)
        rows = torch.arange(len(counts), device=device).unsqueeze(1)
        probabilities = self._warp(logits[rows, places])
        self._proposed = existing_index(probabilities, uniforms.to(device))
        self._unseen = self._unseen[:, :0]
        self._num_unseen = [0] * len(counts)
        return Proposal(self._proposed.to(self._device), probabilities.to(self._device))

    def _with_masks(self, num_masks: int) -> Tensor:
        """Return the unseen tokens of each row, and at least `num_masks` masks behind them [B, n]."""
        num_rows = len(self._num_unseen)
        longest = max(self._num_unseen)
        width = longest + num_masks
        unseen = filled_up(self._unseen[:, :longest], num_rows, width)
        places = torch.arange(width, device=unseen.device)
        counts = to_device(self._num_unseen, unseen.device).unsqueeze(1)
        return unseen.masked_fill(places >= counts, self._mask)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        decided = decided_tokens(self._proposed, num_accepted, next_tokens)
        num_before = self._num_unseen
        longest = max(num_before)
        if longest == 0:
            self._unseen = decided
        else:
            num_rows, num_decided = decided.shape
            unseen = filled_up(self._unseen[:, :longest], num_rows, longest + num_decided)
            starts = to_device(num_before, decided.device).unsqueeze(1)
            places = starts + torch.arange(num_decided, device=decided.device)
            self._unseen = unseen.scatter(1, places, decided)
        counts = zip(num_before, num_accepted, strict=True)
        self._num_unseen = [before + count + 1 for before, count in counts]
        self._proposed = self._proposed[:, :0]

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        index = to_device(rows, self._unseen.device)
        self._unseen = self._unseen[index]
        self._proposed = self._proposed[index]
        self._num_unseen = [self._num_unseen[row] for row in rows]
