"""Draft models with the target's tokenizer: token by token, or all tokens in one pass.

`translated` has those with another tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.local.decoding.randomness import existing_index
from harness.local.decoding.transfer import padded, to_device
from harness.local.decoding.warp import AnyWarp

# Where a configuration names the mask of a parallel draft, in the order in which vLLM looks for it.
_KEYS = ("pard_token", "ptd_token_id")


class ModelDrafter(Drafter):
    """Proposes by running a draft model, token by token.

    The runner's cache lacks the last tokens of each row's text, `_unread`, with which the next proposal
    begins. Say it was fed `a`, and drew b, c and d. To draw d it was fed b and c, but never d itself:

        accepted b, then x         the cache keeps `a b`, and lacks `x`
        accepted b, c, d, then x   the cache keeps `a b c`, and lacks `d x`

    To keep the batch rectangular, all rows lack two tokens as soon as one does. The other rows give a
    cached token back: the first one then lacks `b x`. Tokens that were decided without a proposal are
    unread, too.

    Args:
        runner: the draft model's.
        warp: the one for the target's logits.
        device: the target's, where proposals are used.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp, device: torch.device | str = "cpu") -> None:
        self.runner = runner
        self.warp = warp
        self._device = device
        # Of each row: its unread tokens, and what the last proposal fed until its verdict.
        self._unread: list[list[int]] = []
        self._fed: list[list[int]] = []
        # The runner's own proposal [B, K], until its verdict.
        self._drafted: Tensor | None = None

    def clear(self) -> None:
        self._unread = []

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        read = self.runner.add if self._unread else self.runner.start
        self._runner_device = read(self._own_prompts(prompts)).logits.device
        self._unread += [self._own_tokens([token]) for token in first_tokens]
        self._forget_proposal()

    def _own_prompts(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the prompts as the draft model reads them."""
        return prompts

    def _own_tokens(self, decided: list[int]) -> list[int]:
        """Return decided tokens as the draft model reads them."""
        return decided

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        tokens, probabilities = self._draw(uniforms.to(self._runner_device), self.warp)
        return Proposal(tokens.to(self._device), probabilities.to(self._device))

    def _draw(self, uniforms: Tensor, warp: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Feed the unread tokens, and draw tokens [B, K] from distributions [B, K, V].

        The last one or two of each row are fed as the drawing begins: runners compile passes over one
        or two (`Method.widths`).
        """
        num_last = min([2, *map(len, self._unread)])
        num_before = [len(tokens) - num_last for tokens in self._unread]
        if any(num_before):
            before = [tokens[:-num_last] for tokens in self._unread]
            self.runner.extend(to_device(padded(before, max(num_before)), self._runner_device))
            self.runner.keep(num_before)
        self._fed = [tokens[-num_last:] for tokens in self._unread]
        self._unread = [[] for _ in self._fed]
        last = to_device(self._fed, self._runner_device)
        self._drafted, probabilities = self.runner.draw(last, uniforms, warp)
        return self._drafted, probabilities

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        drafted: list[list[int]] = [[] for _ in next_tokens]
        if self._drafted is not None:
            drafted = self._drafted.tolist()
        texts = []
        num_read = []
        for row, (count, token) in enumerate(zip(num_accepted, next_tokens, strict=True)):
            fed = self._fed[row]
            decided = self._own_tokens([*self._offered(drafted[row][:count]), token])
            texts.append([*fed, *self._unread[row], *decided])
            # What draws without feeding its own tokens leaves nothing in the cache.
            read = [*fed, *drafted[row][:-1]] if fed else []
            num_read.append(len(commonprefix([texts[-1][:-1], read])))  # noqa: RUF071
        if any(self._fed):
            pairs = list(zip(texts, num_read, strict=True))
            num_unread = min(2, max(len(text) - count for text, count in pairs))
            num_read = [min(count, len(text) - num_unread) for text, count in pairs]
            self.runner.keep(num_read)
        self._unread = [text[count:] for text, count in zip(texts, num_read, strict=True)]
        self._forget_proposal()

    def _offered(self, drafted: list[int]) -> list[int]:
        """Return the target's tokens for drafted ones."""
        return drafted

    def select(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)
        self._unread = [self._unread[row] for row in rows]
        self._forget_proposal()

    def _forget_proposal(self) -> None:
        self._fed = [[] for _ in self._unread]
        self._drafted = None


class ParallelDrafter(ModelDrafter):
    """Proposes by one pass of a parallel draft model (PARD, An et al. 2025, arXiv:2504.18583).

    It was trained with a mask token in place of tokens that are not known yet. For K = 3 it reads the
    text `a b` and two masks, and predicts the next three tokens after b, after the first mask and
    after the second. Each is drawn without knowing the others.

    The masks are dropped from the cache at once, so that nothing has to be taken back after a verdict.

    Args:
        mask: the token that stands for those not known yet.
    """

    def __init__(
        self, runner: Runner, warp: AnyWarp, mask: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(runner, warp, device)
        self._mask = mask

    def _draw(self, uniforms: Tensor, warp: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        counts = list(map(len, self._unread))
        num_draft_tokens = uniforms.shape[1]
        width = max(counts) + num_draft_tokens - 1
        read = [[*row, *[self._mask] * (width - len(row))] for row in self._unread]
        logits = self.runner.extend(to_device(read, self._runner_device)).logits
        self.runner.keep(counts)
        self._unread = [[] for _ in counts]
        last = to_device(counts, logits.device).unsqueeze(1) - 1
        index = last + torch.arange(num_draft_tokens, device=logits.device)
        rows = torch.arange(len(counts), device=logits.device).unsqueeze(1)
        probabilities = warp(logits[rows, index])
        self._drafted = existing_index(probabilities, uniforms)
        return self._drafted, probabilities


def mask_token(config: PreTrainedConfig) -> int | None:
    """Return the mask that a draft model was trained with; None if it drafts token by token."""
    for key in _KEYS:
        token = getattr(config, key, None)
        if token is not None:
            return token
    return None
