"""What a draft is trained on: to predict what the target would, from what it will have when it drafts.

All of these are cross-entropies against the target's whole distribution, which differs from the KL divergence only by
the target's own entropy. Rows are padded on the right, where a causal model sees nothing of the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from harness.drafting.blocks import Head, SlotCache
from harness.drafting.dflash import BlockHead
from harness.drafting.eagle import EagleHead
from harness.drafting.medusa import MedusaHead
from harness.runners.base import run_model

# Tokens further ahead are tested less often: each step counts this much of the one before.
DECAY = 0.8
# Blocks of one row that a DFlash head is trained on at a time.
BLOCKS = 8


@dataclass(frozen=True)
class Lesson:
    """A batch of texts, and what the target makes of them.

    Attributes:
        tokens: [B, n], padded on the right.
        counts: [B, n], whether the target's distribution after a token is one to learn: from the last token of the
            prompt to the last but one of the answer.
        wanted: [B, n, V], these distributions.
        hidden: [B, n, L, D], the layers' states that a head reads.
    """

    tokens: Tensor
    counts: Tensor
    wanted: Tensor
    hidden: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in vars(self).values() if tensor is not None)

    def to(self, device: torch.device | str) -> Lesson:
        """The same on another device."""
        hidden = None if self.hidden is None else self.hidden.to(device)
        return Lesson(
            self.tokens.to(device), self.counts.to(device), self.wanted.to(device), hidden
        )

    def features(self) -> Tensor:
        """The hidden states side by side [B, n, L * D], in float32."""
        assert self.hidden is not None
        return self.hidden.flatten(2).float()

    def loss(
        self, logits: Tensor, ahead: int, first: int = 0, tokens: Tensor | None = None
    ) -> Tensor:
        """Cross-entropy of logits [B, n, V of the draft], whose entry i predicts what follows token i + ahead.

        Args:
            first: entries before this one do not count.
            tokens: of the target [V of the draft], where the draft knows some of them alone.
        """
        end = self.tokens.shape[1] - ahead
        return soft_loss(
            logits[:, first:end],
            self.wanted[:, first + ahead :],
            self.counts[:, first + ahead :],
            tokens,
        )


def soft_loss(
    logits: Tensor, wanted: Tensor, counts: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy of logits [..., V] against probabilities [..., V] where `counts` [...]."""
    if tokens is not None:
        wanted = wanted[..., tokens]
    logits = logits[..., : wanted.shape[-1]]
    each = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    return (each * counts).sum() / counts.sum().clamp(min=1)


Loss = Callable[[Lesson], Tensor]


@torch.no_grad()
def lesson(
    target: PreTrainedModel, tokens: Tensor, counts: Tensor, layers: tuple[int, ...], size: int
) -> Lesson:
    """One forward pass of the target; its distributions are cut to the first `size` tokens."""
    logits, *hidden = run_model(target, {"hidden_layers": layers}, tokens, DynamicCache())
    return Lesson(
        tokens, counts, logits[..., :size].float().softmax(-1), hidden[0] if hidden else None
    )


def loss_of(module: nn.Module, target: PreTrainedModel, num_steps: int) -> Loss:
    """The loss of a head or a draft model.

    Args:
        num_steps: tokens ahead that an EAGLE-3 chain is trained to draft.
    """
    embedding: Any = getattr(module, "embed_tokens", None) or target.get_input_embeddings()
    output: Any = getattr(module, "lm_head", None) or target.get_output_embeddings()
    if isinstance(module, EagleHead):
        return lambda given: _eagle(module, embedding, output, num_steps, given)
    if isinstance(module, BlockHead):
        return lambda given: _block(module, embedding, output, given)
    if isinstance(module, MedusaHead):
        return lambda given: _medusa(module, output, given)
    return lambda given: given.loss(module(input_ids=given.tokens, use_cache=False).logits, 0)


class _Unrolled(SlotCache):
    """Chains from every token at once: step s of the chain that began at entry i - s is at position i.

    A query sees the entries from the target's features up to where its chain began, then its chain.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions  # [B, n], the same in every step
        self.step = 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if (held := self._layers.get(layer)) is not None:
            keys, values = torch.cat([held[0], keys], 2), torch.cat([held[1], values], 2)
        self._layers[layer] = keys, values
        return keys, values

    def seen(self, first: Tensor, last: Tensor) -> Tensor:
        ahead = last.unsqueeze(-1) - self.positions[:, None, :]  # [B, n, n], from key to query
        window = last.unsqueeze(-1) - first.unsqueeze(-1)
        steps = [(ahead >= self.step) & (ahead <= window)]
        steps += [ahead == self.step - step for step in range(1, self.step + 1)]
        return torch.cat(steps, dim=-1).unsqueeze(1)


def _eagle(head: EagleHead, embedding: Any, output: Any, num_steps: int, given: Lesson) -> Tensor:
    """Training-time test (arXiv:2503.01840, section 3.2): each step reads the states that the head itself made."""
    embedded, states = embedding(given.tokens[:, 1:]), head.join(given.features()[:, :-1])
    cache = _Unrolled(torch.arange(states.shape[1], device=states.device).expand(states.shape[:2]))
    losses = []
    for step in range(num_steps):
        cache.step = step
        states = head(embedded, states, cache)
        normed = head.norm(states)
        losses.append(given.loss(output(normed), 1, step, _known(head)) * DECAY**step)
        states = nn.functional.pad(normed if head.config.norm_output else states, (0, 0, 1, -1))
    return torch.stack(losses).sum()


def _block(head: BlockHead, embedding: Any, output: Any, given: Lesson) -> Tensor:
    """Blocks after some tokens of each row, drawn again for each lesson, as `BlockDrafter` drafts them."""
    config, device, (num_rows, length) = head.config, given.tokens.device, given.tokens.shape
    most, skipped = config.most_tokens, config.block_size - config.most_tokens
    # A block after token a - 1 of features begins with token a; its first prediction is of token a + 1.
    possible = given.counts[:, 1 : length - most + 1].float() + 1e-9
    anchors = 1 + torch.multinomial(possible, BLOCKS, replacement=True).flatten().unsqueeze(1)
    rows = torch.arange(num_rows, device=device).repeat_interleave(BLOCKS)
    cache = SlotCache()
    cache.positions = torch.arange(length, device=device).expand(num_rows, -1)
    cache.num_slots = length + config.block_size
    head.read(given.features(), cache)
    cache.select(rows)
    cache.positions = anchors + torch.arange(config.block_size, device=device)
    queries = torch.full((len(rows), config.block_size), config.mask_token_id, device=device)
    queries[:, :1] = given.tokens[rows].gather(1, anchors)
    states = head(embedding(queries), cache)[:, skipped:]
    ahead = anchors + torch.arange(most, device=device)  # whose next tokens the states predict
    weights = DECAY ** torch.arange(most, device=device)
    counts = given.counts[rows].gather(1, ahead) * weights
    wanted = given.wanted[rows.unsqueeze(1), ahead]
    return soft_loss(output(states), wanted, counts, _known(head))


def _known(head: Head) -> Tensor | None:
    """The target's tokens that a head of a smaller vocabulary can draft; None for all."""
    return (
        None if head.d2t is None else head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)
    )


def _medusa(head: MedusaHead, output: Any, given: Lesson) -> Tensor:
    """Head h predicts the token h + 2 after the state that it reads."""
    losses = []
    for number in range(head.config.num_heads):
        states, blocks = given.features(), head.parts(number)
        own = blocks.pop() if head.config.own_outputs else output
        for block in blocks:
            states = block(states)
        losses.append(given.loss(own(states), number + 1) * DECAY**number)
    return torch.stack(losses).sum()
