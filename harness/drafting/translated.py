"""A draft model with another tokenizer, in one of two ways (Timor et al. 2025, arXiv:2502.05202).

By `intersection` it draws from the tokens that both vocabularies have. The draft's distribution is then one over the
target's vocabulary, and verification is the usual one.

By `text` it drafts text by argmax, which is read again by the target's tokenizer. Such proposals are deterministic.

What was decided is translated piece by piece and not as a whole, so the draft model may read other tokens than it would
of the whole text. That costs acceptance, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.decoding.transfer import padded, to_device
from harness.decoding.warp import AnyWarp, BatchWarp, CommonWarp, Warp


@dataclass(frozen=True)
class Translation:
    """Between two tokenizers.

    Attributes:
        common: (the target's id, the draft's id) of each token that both have.
        read_prompt: a prompt of the target's tokens as the draft's, at least one.
        into_draft: tokens of the target that follow others, as the draft's; none while a character is incomplete.
        into_target: the draft's tokens as the target's, as far as they are whole characters.
        num_tokens: the width of the target's logits.
        name: `intersection` or `text`, how the draft's tokens become the target's.
    """

    common: Sequence[tuple[int, int]]
    read_prompt: Callable[[Sequence[int]], list[int]]
    into_draft: Callable[[Sequence[int]], list[int]]
    into_target: Callable[[Sequence[int]], list[int]]
    num_tokens: int
    name: Literal["intersection", "text"]

    @cached_property
    def own_tokens(self) -> tuple[int, ...]:
        """The draft's id of each token that both have."""
        return tuple(own for _, own in self.common)


class TranslatedDrafter(Drafter):
    """Proposes with a draft model whose cache follows the text in its own tokens.

    Args:
        runner: of the draft model, with its own vocabulary.
        warp: the one applied to the target's logits.
        device: the target's, where proposals are used.
    """

    layers = ()
    reads_verdicts = True

    def __init__(
        self,
        runner: Runner,
        translation: Translation,
        warp: AnyWarp,
        device: torch.device | str = "cpu",
    ) -> None:
        self._runner = runner
        self._translation = translation
        self._warp = warp
        self._device = device
        self._target_token = {own: target for target, own in translation.common}
        # For each row: the target's tokens that are not translated yet, the draft's tokens that its
        # runner has not been fed, and the last proposal in the draft's tokens (the runner lacks the
        # last one) and in the target's.
        self._untranslated: list[list[int]] = []
        self._pending: list[list[int]] = []
        self._drafted: list[list[int]] = []
        self._offered: list[list[int]] = []
        # How many tokens of each row the last proposal fed before its own.
        self._fed: list[int] = []

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        """See `Drafter.start`."""
        self._untranslated = []
        self._pending = []
        self._drafted = []
        self._offered = []
        logits = self._runner.start(self._read_prompts(prompts)).logits
        # The tokens that both have, on the device where each is used.
        translation = self._translation
        self._common = to_device([target for target, _ in translation.common], self._device)
        self._own = to_device(translation.own_tokens, logits.device)
        self._join(first_tokens)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        """See `Drafter.add`."""
        self._runner.add(self._read_prompts(prompts))
        self._join(first_tokens)

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        has_news = [bool(row) for row in self._pending]
        tokens = self._feed_but_last()
        num_fed = tokens.shape[1]
        self._fed = [num_fed if is_fed else 0 for is_fed in has_news]
        warp = drawing_warp(self._translation, self._warp)
        drawn, probabilities = self._runner.draw(tokens, uniforms.to(tokens.device), warp)
        self._drafted = drawn.tolist()
        spread = None
        if self._translation.name == "intersection":
            spread = self._spread(probabilities)
        return self._offer(num_draft_tokens, spread, has_news)

    def _feed_but_last(self) -> Tensor:
        """Feed the runner what each row has not read, but for the last tokens [B, 1 or 2], which are returned."""
        # A row without news takes part, and is offered nothing.
        rows = [row or [0] for row in self._pending]
        num_last = min(2, *map(len, rows)) if all(self._pending) else 1
        counts = [len(row) - num_last for row in rows]
        width = max(counts)
        if width > 0:
            before = [row[:count] for row, count in zip(rows, counts, strict=True)]
            self._runner.extend(to_device(padded(before, width), self._own.device))
            self._runner.keep(counts)
        self._pending = [[] for _ in rows]
        last = [row[-num_last:] for row in rows]
        return to_device(last, self._own.device)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        """See `Drafter.observe`."""
        has_proposed = bool(self._drafted)
        kept: list[int] = []
        for row, (count, next_token) in enumerate(zip(num_accepted, next_tokens, strict=True)):
            accepted = self._offered[row][:count] if has_proposed else []
            self._untranslated[row] += [*accepted, next_token]
            read = self._translation.into_draft(self._untranslated[row])
            if read:
                self._untranslated[row] = []
            # Behind a token that only fills a row up nothing is kept.
            num_fed = self._fed[row] if has_proposed else 0
            num_same = _num_equal(read, self._drafted[row]) if num_fed > 0 else 0
            kept.append(num_fed + num_same)
            self._pending[row] += read[num_same:]
        if has_proposed:
            self._runner.keep(kept)
        self._drafted = []
        self._offered = []

    def select(self, rows: Sequence[int]) -> None:
        """See `Drafter.select`."""
        self._runner.select(rows)
        self._untranslated = [self._untranslated[row] for row in rows]
        self._pending = [self._pending[row] for row in rows]

    def _read_prompts(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [self._translation.read_prompt(prompt) for prompt in prompts]

    def _join(self, first_tokens: Sequence[int]) -> None:
        """Take the first decided token of new rows."""
        for token in first_tokens:
            read = self._translation.into_draft([token])
            self._untranslated.append([] if read else [token])
            self._pending.append(read)

    def _spread(self, probabilities: Tensor) -> Tensor:
        """Distributions [B, K, V of the draft] as ones over the target's [B, K, V]."""
        common = probabilities[..., self._own].to(self._device)
        whole = common.new_zeros(*common.shape[:-1], self._translation.num_tokens)
        return whole.index_copy_(-1, self._common, common)

    def _offer(self, most: int, spread: Tensor | None, has_news: Sequence[bool]) -> Proposal:
        """The draft in the target's tokens; a row without news is offered none."""
        self._offered = []
        for drafted, is_ready in zip(self._drafted, has_news, strict=True):
            offered = self._into_target(drafted)[:most] if is_ready else []
            self._offered.append(offered)
        tokens = to_device(padded(self._offered, most), self._device)
        return Proposal(tokens, spread, [len(offered) for offered in self._offered])

    def _into_target(self, tokens: Sequence[int]) -> list[int]:
        if self._translation.name == "text":
            return self._translation.into_target(tokens)
        return [self._target_token[token] for token in tokens]


def drawing_warp(translation: Translation, of_target: AnyWarp) -> AnyWarp:
    """The warp that the draft's tokens are drawn with, where the target's are drawn with `of_target`."""
    if translation.name == "text":
        return Warp(0)
    current = of_target.current if isinstance(of_target, BatchWarp) else of_target
    assert not isinstance(current, BatchWarp | CommonWarp)
    return CommonWarp(current, translation.own_tokens)


def _num_equal(read: Sequence[int], drafted: Sequence[int]) -> int:
    """How many tokens need not be read again, because the draft model drafted them itself.

    The last token of either is never among them: its logits are needed.
    """
    most = min(len(read), len(drafted)) - 1
    for index in range(most):
        if read[index] != drafted[index]:
            return index
    return max(most, 0)
