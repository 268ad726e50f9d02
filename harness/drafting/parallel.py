"""PARD (An et al. 2025, arXiv:2504.18583): a draft model that drafts all tokens in one pass.

It was trained with a mask token in place of tokens that are not known yet. Behind the decided
tokens of a row follow as many masks as it takes, and each predicts the token after its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from harness.config.errors import SettingError
from harness.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.decoding.randomness import existing_index
from harness.decoding.transfer import to_device
from harness.decoding.warp import AnyWarp

# Where a configuration names the mask, in the order in which vLLM looks for it.
_KEYS = ("pard_token", "ptd_token_id")


def mask_token(config: PreTrainedConfig) -> int | None:
    """The mask that a draft model was trained with; None for one that drafts token by token."""
    return next((token for key in _KEYS if (token := getattr(config, key, None)) is not None), None)


def checked_mask(name: str, config: PreTrainedConfig) -> int | None:
    """The mask of a draft. Raises SettingError for one outside its vocabulary."""
    mask: Any = mask_token(config)
    size = config.get_text_config(decoder=True).vocab_size
    if mask is not None and not (type(mask) is int and 0 <= mask < size):
        rule = f"has a config.json whose mask token, {mask}, is not in its vocabulary of {size}"
        raise SettingError("draft", rule, name)
    return mask


class ParallelDrafter(Drafter):
    """Proposes by one pass of a parallel draft model.

    A pass reads the tokens that were decided since the last one, and masks. The masks are dropped at
    once, so that nothing has to be taken back after a verdict.

    Args:
        runner: of the draft model.
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
        # Decided tokens of each row that the runner has not been fed, and the row's proposal.
        self._unseen: list[list[int]] = []
        self._proposed: list[list[int]] = []

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        """See `Drafter.start`."""
        self._home = self._runner.start(prompts).logits.device
        self._unseen = [[token] for token in first_tokens]
        self._proposed = [[] for _ in prompts]

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        """See `Drafter.add`."""
        self._runner.add(prompts)
        self._unseen += [[token] for token in first_tokens]
        self._proposed += [[] for _ in prompts]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        counts = [len(tokens) for tokens in self._unseen]
        width = max(counts) + num_draft_tokens - 1
        fed = [tokens + [self._mask] * (width - len(tokens)) for tokens in self._unseen]
        logits = self._runner.extend(to_device(fed, self._home)).logits
        self._runner.keep(counts)
        self._unseen = [[] for _ in counts]
        last = to_device(counts, logits.device).unsqueeze(1) - 1
        places = last + torch.arange(num_draft_tokens, device=logits.device)
        rows = torch.arange(len(counts), device=logits.device).unsqueeze(1)
        probabilities = self._warp(logits[rows, places])
        drawn = existing_index(probabilities, uniforms.to(logits.device))
        self._proposed = drawn.tolist()
        return Proposal(drawn.to(self._device), probabilities.to(self._device))

    def replace(self, tokens: Tensor, replaced: Sequence[bool]) -> None:
        """See `FollowingDrafter.replace`."""
        self._proposed = tokens.tolist()

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        """See `Drafter.observe`."""
        decided = zip(self._unseen, self._proposed, num_accepted, next_tokens, strict=True)
        self._unseen = [
            [*unseen, *proposed[:count], following]
            for unseen, proposed, count, following in decided
        ]
        self._proposed = [[] for _ in self._unseen]

    def select(self, rows: Sequence[int]) -> None:
        """See `Drafter.select`."""
        self._runner.select(rows)
        self._unseen = [self._unseen[row] for row in rows]
        self._proposed = [self._proposed[row] for row in rows]
