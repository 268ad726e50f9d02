"""A draft model with another tokenizer: it draws from the tokens that both vocabularies have.

Its distribution is then one over the target's vocabulary, and verification is the usual one (Timor et al. 2025,
arXiv:2502.05202). Decided tokens that the draft lacks are spelt in its own, each by itself. So the draft model may see
other tokens than its tokenizer would make of the whole text. That lowers acceptance, but changes no distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from harness.local.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.local.decoding.transfer import padded, to_device
from harness.local.decoding.warp import AnyWarp, CommonWarp, TokenIds, current_warp


@dataclass(frozen=True)
class Translation:
    """A translation between the tokens of a target and of its draft.

    Attributes:
        common: the tokens that both have: the draft's id for each of the target's, ascending.
        prompt_into_draft: turns the target's tokens of a prompt into the draft's, at least one.
        spell: turns one token of the target into the draft's, at least one.
        target_vocabulary_size: the width of the target's logits.
    """

    common: Mapping[int, int]
    prompt_into_draft: Callable[[Sequence[int]], list[int]]
    spell: Callable[[int], Sequence[int]]
    target_vocabulary_size: int

    @cached_property
    def common_target_tokens(self) -> TokenIds:
        return TokenIds(tuple(self.common))

    @cached_property
    def common_draft_tokens(self) -> TokenIds:
        return TokenIds(tuple(self.common.values()))

    @cached_property
    def target_tokens(self) -> dict[int, int]:
        """The target's id for each token of the draft that both have."""
        return {draft: target for target, draft in self.common.items()}

    def drawing_warp(self, of_target: AnyWarp) -> CommonWarp:
        """Return the warp for the draft's logits, given the one for the target's: over the common tokens alone."""
        current = current_warp(of_target)
        assert not isinstance(current, CommonWarp)
        return CommonWarp(current, self.common_draft_tokens)

    def into_draft(self, tokens: Sequence[int]) -> list[int]:
        """Turn the target's next tokens into the draft's."""
        return [own for token in tokens for own in self.spell(token)]


@dataclass
class _Row:
    """One row of the batch, from one verdict to the next.

    Say the target decided `blue`, which the draft's tokenizer writes as `bl` and `ue`. Then
    `unread` is [`bl`, `ue`]. A proposal of K = 2 feeds both to the draft's runner and draws `sky`
    and `.`: `unread` is empty, `num_fed` is 2, `drafted` is [`sky`, `.`]. The runner has read `sky`
    too, to draw `.`. Say the verdict accepts `sky`, and `!` follows. The runner then keeps the two
    fed tokens and `sky`; `unread` is [`!`].

    Attributes:
        unread: the draft's decided tokens that its runner has not read.
        num_fed: how many tokens the last proposal fed before it drew; 0 where nothing was proposed since the verdict.
        drafted: the last proposal in the draft's tokens; the runner has read all but the last.
        offered: the last proposal in the target's tokens.
    """

    unread: list[int]
    num_fed: int = 0
    drafted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)


class TranslatedDrafter(Drafter):
    """Proposes with a draft model whose cache follows the text in its own tokens.

    Args:
        runner: the draft model's, with its own vocabulary.
        translation: between the target's tokens and the draft's.
        warp: the warp for the target's logits.
        device: the target's, where proposals are used.
    """

    layers = ()

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
        self._rows: list[_Row] = []

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        logits = self._runner.start(self._translate_prompts(prompts)).logits
        # Of the tokens that both have, on the device where each is used.
        self._common_target_ids = self._translation.common_target_tokens.on(self._device)
        self._common_draft_ids = self._translation.common_draft_tokens.on(logits.device)
        self._rows = []
        self._join(first_tokens)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._runner.add(self._translate_prompts(prompts))
        self._join(first_tokens)

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        last = self._feed_all_but_last()
        warp = self._translation.drawing_warp(self._warp)
        if not uniforms.is_floating_point():
            uniforms = self._common_draft_token(uniforms)
        drawn, draft_probabilities = self._runner.draw(last, uniforms.to(last.device), warp)
        target_tokens = self._translation.target_tokens
        # Of nan a token is drawn that the target may lack; the verdict refuses the probabilities.
        any_token = next(iter(target_tokens.values()))
        for row, drafted in zip(self._rows, drawn.tolist(), strict=True):
            row.num_fed = last.shape[1]
            row.drafted = drafted
            row.offered = [target_tokens.get(token, any_token) for token in drafted]
        tokens = to_device([row.offered for row in self._rows], self._device)
        return Proposal(tokens, self._over_target(draft_probabilities))

    def _common_draft_token(self, tokens: Tensor) -> Tensor:
        """Turn tokens [B, K] of the target that are to be taken into the draft's; of those that the draft lacks any,
        because nothing is accepted from them on.
        """
        common = self._translation.common
        any_token = next(iter(common.values()))
        rows = [[common.get(token, any_token) for token in row] for row in tokens.tolist()]
        return to_device(rows, tokens.device)

    def _feed_all_but_last(self) -> Tensor:
        """Feed the unread tokens of each row, but for the last [B, 1 or 2], which are returned.

        Two are the usual number after a proposal that was accepted whole: its last token, and the
        token that follows it. Runners compile passes over one or two (`Method.widths`).
        """
        unread = [row.unread for row in self._rows]
        num_last = min([2, *map(len, unread)])
        num_before = [len(tokens) - num_last for tokens in unread]
        width = max(num_before)
        device = self._common_draft_ids.device
        if width > 0:
            before = [tokens[:-num_last] for tokens in unread]
            self._runner.extend(to_device(padded(before, width), device))
            self._runner.keep(num_before)
        for row in self._rows:
            row.unread = []
        return to_device([tokens[-num_last:] for tokens in unread], device)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        has_proposed = any(row.drafted for row in self._rows)
        num_kept: list[int] = []
        for row, count, next_token in zip(self._rows, num_accepted, next_tokens, strict=True):
            translated = self._translation.into_draft([*row.offered[:count], next_token])
            num_same = _num_equal(translated, row.drafted)
            num_kept.append(row.num_fed + num_same)
            row.unread += translated[num_same:]
            row.num_fed = 0
            row.drafted = []
            row.offered = []
        if has_proposed:
            self._runner.keep(num_kept)

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        self._rows = [self._rows[row] for row in rows]

    def _translate_prompts(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [self._translation.prompt_into_draft(prompt) for prompt in prompts]

    def _join(self, first_tokens: Sequence[int]) -> None:
        """Add rows whose first decided token is given."""
        for token in first_tokens:
            self._rows.append(_Row(self._translation.into_draft([token])))

    def _over_target(self, probabilities: Tensor) -> Tensor:
        """Turn distributions [B, K, V of the draft] into ones over the target's [B, K, V]."""
        common = probabilities[..., self._common_draft_ids].to(self._device)
        shape = (*common.shape[:-1], self._translation.target_vocabulary_size)
        return common.new_zeros(shape).index_copy_(-1, self._common_target_ids, common)


def _num_equal(translated: Sequence[int], drafted: Sequence[int]) -> int:
    """Count the first decided tokens that the draft's runner has read, because it drafted them.

    The last token of either is never among them: the runner has not read its own last one, and the
    next proposal needs the logits after the last decided one.
    """
    most = min(len(translated), len(drafted)) - 1
    for index in range(most):
        if translated[index] != drafted[index]:
            return index
    return max(most, 0)
