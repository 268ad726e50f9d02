"""The losses with which the shipped heads are trained. A head learns the target's whole distributions, from the inputs
that it has when it drafts.

All losses are cross-entropies, which differ from the KL divergence only by the entropy of the target's distributions.
Rows are padded on the right, so that a causal model does not see the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.local.drafting.heads.block import DFlash
from harness.local.drafting.heads.eagle import Eagle3
from harness.local.drafting.heads.head import Head, Unread
from harness.local.drafting.heads.medusa import Medusa
from harness.local.runners.slots import SlotCache

# The weight of a draft token is this share of the weight of the one before, because verification reaches later tokens
# less often.
DECAY = 0.8
# The number of tokens that an EAGLE-3 head is trained to draft.
CHAIN = 4
# The number of blocks of each row in a training step of DFlash.
BLOCKS = 8


@dataclass(frozen=True)
class Batch:
    """Texts, and the target's outputs for them.

    Attributes:
        tokens: [B, n], padded on the right.
        is_learned: [B, n], whether the target's distribution after a token is learned.
        target_probabilities: [B, n, V], the target's distribution after each token.
        features: [B, n, L * D], the hidden states of the L layers that the head reads, concatenated.
    """

    tokens: Tensor
    is_learned: Tensor
    target_probabilities: Tensor
    features: Tensor

    def loss(self, logits: Tensor, ahead: int, first: int = 0) -> Tensor:
        """The mean cross-entropy of logits [B, m, V], whose entry i predicts the distribution after token i + `ahead`.

        Entries before `first` are left out.
        """
        end = max(0, self.tokens.shape[1] - ahead)
        return soft_loss(
            logits[:, first:end],
            self.target_probabilities[:, first + ahead :],
            self.is_learned[:, first + ahead :],
        )


def soft_loss(logits: Tensor, target_probabilities: Tensor, weights: Tensor) -> Tensor:
    """The mean cross-entropy between distributions [..., V] and logits [..., V], with weights [...]."""
    each = -(target_probabilities * logits.float().log_softmax(-1)).sum(-1)
    return (each * weights).sum() / weights.sum().clamp(min=1)


def loss_of(head: Head, target: Any, batch: Batch) -> Tensor:
    """The loss of a head. First the head borrows the modules that it lacks, such as embeddings, from the target."""
    head.borrow(target)
    if isinstance(head, Eagle3):
        return eagle_loss(head, batch)
    if isinstance(head, DFlash):
        return block_loss(head, batch)
    assert isinstance(head, Medusa)
    return medusa_loss(head, batch)


def eagle_loss(head: Eagle3, batch: Batch) -> Tensor:
    """The loss of EAGLE-3's training-time test (section 3.2 of its paper).

    A chain of draft tokens begins at every token of a text, and all chains are computed together. Step s computes the
    s-th draft entry of each chain, from the states that step s - 1 computed.
    """
    embedded = head.embed(batch.tokens[:, 1:])
    states = head.join(batch.features[:, :-1])
    num_rows, length = states.shape[:2]
    cache = _Unrolled(torch.arange(length, device=states.device).expand(num_rows, length))
    losses = []
    for step in range(CHAIN):
        cache.step = step
        states = head(embedded, states, cache)
        logits, following = head.predict(states)
        # Chains begin at position 0 or later, so their entries in this step are at position `step` or later.
        losses.append(batch.loss(logits, ahead=1, first=step) * DECAY**step)
        # The state of entry i becomes the input of entry i + 1. The zeros at the beginning have no effect on the loss.
        states = nn.functional.pad(following, (0, 0, 1, -1))
    return torch.stack(losses).sum()


class _Unrolled(SlotCache):
    """A cache for passes over all chains together, one pass for each step.

    In step 0, position i has entry i, which is computed from the target's features. In step s, position i has the s-th
    draft entry of the chain that began at entry i - s. For example, in step 2 position 5 continues the chain from entry
    3. It sees entries 0 to 3 of step 0, position 4 of step 1, and itself.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions  # [B, n], the same in every step
        self.step = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.buffers:
            earlier_keys, earlier_values = self.buffers[layer_idx]
            key_states = torch.cat([earlier_keys, key_states], 2)
            value_states = torch.cat([earlier_values, value_states], 2)
        self.buffers[layer_idx] = key_states, value_states
        return key_states, value_states

    def range_mask(self, first: Tensor, last: Tensor) -> Tensor:
        """A mask [B, 1, n, (steps so far) * n]. The keys of step 0 come first, then those of step 1, and so on."""
        ahead = last.unsqueeze(-1) - self.positions[:, None, :]  # [B, n, n], from key to query
        window = last.unsqueeze(-1) - first.unsqueeze(-1)
        seen_of_steps = [(ahead >= self.step) & (ahead <= window)]
        for step in range(1, self.step + 1):
            seen_of_steps.append(ahead == self.step - step)
        return torch.cat(seen_of_steps, dim=-1).unsqueeze(1)


def block_loss(head: DFlash, batch: Batch) -> Tensor:
    """The loss of DFlash over `BLOCKS` blocks of each row, computed as in `DFlash.draft`, at random anchors.

    The anchor of a block is the last decided token before its draft tokens.
    """
    config = head.config
    num_rows, length = batch.tokens.shape
    most = head.config.most_tokens
    # A block whose anchor is token a sees the features up to token a - 1, and predicts the tokens from a + 1 on. All of
    # these must be within the text.
    possible = batch.is_learned[:, 1 : 1 + length - most].float() + 1e-9
    anchors = 1 + torch.multinomial(possible, BLOCKS, replacement=True).flatten()
    rows = torch.arange(num_rows).repeat_interleave(BLOCKS)
    tokens = batch.tokens[rows]

    cache = SlotCache()
    cache.num_slots = length + config.block_size
    starts = torch.zeros(num_rows, dtype=torch.long)
    head.read(Unread(batch.features, batch.tokens, starts + length, starts), cache)
    for layer, buffers in cache.buffers.items():
        cache.buffers[layer] = buffers[0][rows], buffers[1][rows]
    cache.place(anchors, config.block_size)
    queries = torch.full((len(rows), config.block_size), config.mask_token_id)
    queries[:, :1] = tokens.gather(1, anchors.unsqueeze(1))
    states = head(head.embed(queries), cache)

    ahead = torch.arange(most)
    positions = anchors.unsqueeze(1) + ahead
    weights = batch.is_learned[rows].gather(1, positions) * DECAY**ahead
    probabilities = batch.target_probabilities[rows.unsqueeze(1), positions]
    return soft_loss(head.logits(states[:, config.block_size - most :]), probabilities, weights)


def medusa_loss(head: Medusa, batch: Batch) -> Tensor:
    """The sum of the losses of Medusa's heads. From the state at token i, head h learns the distribution of token
    i + h + 2.
    """
    losses = []
    for number in range(head.config.num_heads):
        logits = head.logits_ahead(number, batch.features)
        losses.append(batch.loss(logits, ahead=number + 1) * DECAY**number)
    return torch.stack(losses).sum()
