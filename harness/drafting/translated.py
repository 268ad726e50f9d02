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
from typing import Literal

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.decoding.randomness import existing_index
from harness.decoding.transfer import to_device
from harness.decoding.warp import AnyWarp


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


class TranslatedDrafter(Drafter):
    """Proposes with a draft model whose cache follows the text in its own tokens.

    Args:
        runner: of the draft model, with its own vocabulary.
        warp: the one applied to the target's logits.
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
        self._runner, self._translation, self._warp, self._device = (
            runner,
            translation,
            warp,
            device,
        )
        self._theirs = {own: target for target, own in translation.common}
        self._unread: list[
            list[int]
        ] = []  # the target's tokens of each row that are not translated yet
        self._pending: list[
            list[int]
        ] = []  # the draft's tokens of each row that its runner has not been fed
        self._drafted: list[
            list[int]
        ] = []  # the draft's tokens of the last proposal; the runner lacks the last one
        self._offered: list[list[int]] = []  # the target's

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._unread, self._pending, self._drafted, self._offered = [], [], [], []
        logits = self._runner.start(
            [self._translation.read_prompt(prompt) for prompt in prompts]
        ).logits
        # The tokens that both have, on the device where each is used.
        targets, own = (
            zip(*self._translation.common, strict=True) if self._translation.common else ((), ())
        )
        self._common, self._own = to_device(targets, self._device), to_device(own, logits.device)
        self._join(first_tokens)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._runner.add([self._translation.read_prompt(prompt) for prompt in prompts])
        self._join(first_tokens)

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        counts = list(map(len, self._pending))
        # A row without anything new to read takes part, and is offered nothing.
        padded = [row + [0] * (max(*counts, 1) - len(row)) for row in self._pending]
        logits = self._runner.extend(to_device(padded, self._own.device)).logits
        self._runner.keep(counts)
        rows = torch.arange(len(counts), device=logits.device)
        last = logits[rows, to_device([max(count - 1, 0) for count in counts], logits.device)]
        drawn: list[tuple[Tensor, Tensor | None]] = []
        for place in range(num_draft_tokens):
            if place:
                last = self._runner.extend(drawn[-1][0].unsqueeze(1)).logits[:, -1]
            drawn.append(self._draw(last, uniforms[:, place].to(last.device)))
        self._drafted = torch.stack([token for token, _ in drawn], dim=1).tolist()
        self._pending = [[] for _ in counts]
        return self._told([found for _, found in drawn], [bool(count) for count in counts])

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        kept = []
        proposed = self._drafted or [[]] * len(next_tokens)
        offered = self._offered or [[]] * len(next_tokens)
        for row, (count, next_token) in enumerate(zip(num_accepted, next_tokens, strict=True)):
            self._unread[row] += [*offered[row][:count], next_token]
            if read := self._translation.into_draft(self._unread[row]):
                self._unread[row] = []
            # What it drafted itself need not be read again, except for the last token, whose logits are needed.
            most = min(len(read), len(proposed[row])) - 1
            same = next((i for i in range(most) if read[i] != proposed[row][i]), max(most, 0))
            kept.append(same)
            self._pending[row] += read[same:]
        if self._drafted:
            self._runner.keep(kept)
        self._drafted, self._offered = [], []

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        self._unread = [self._unread[row] for row in rows]
        self._pending = [self._pending[row] for row in rows]

    def _join(self, first_tokens: Sequence[int]) -> None:
        for token in first_tokens:
            read = self._translation.into_draft([token])
            self._unread.append([] if read else [token])
            self._pending.append(read)

    def _draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, V of the draft], uniforms [B] -> tokens of the draft [B], and what they were drawn from."""
        if self._translation.name == "text":
            return logits.argmax(-1), None
        probabilities = self._warp(logits[:, self._own])
        return self._own[existing_index(probabilities, uniforms)], probabilities

    def _told(self, drawn_from: Sequence[Tensor | None], ready: Sequence[bool]) -> Proposal:
        """What was drafted in the target's tokens; `ready` says which rows may be offered any."""
        translate, spread = self._translation.into_target, None
        if found := [one for one in drawn_from if one is not None]:
            translate, common = self._one_to_one, torch.stack(found, dim=1).to(self._device)
            spread = common.new_zeros(*common.shape[:-1], self._translation.num_tokens)
            spread.index_copy_(-1, self._common, common)
        most = len(drawn_from)
        self._offered = [
            translate(row)[:most] if one else []
            for row, one in zip(self._drafted, ready, strict=True)
        ]
        padded = [row + [0] * (most - len(row)) for row in self._offered]
        return Proposal(to_device(padded, self._device), spread, list(map(len, self._offered)))

    def _one_to_one(self, tokens: Sequence[int]) -> list[int]:
        return [self._theirs[token] for token in tokens]
