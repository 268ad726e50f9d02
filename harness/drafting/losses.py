"""Losses: a draft learns to predict the target's distributions from the inputs of drafting.

All are cross-entropies against the target's whole distribution, which differ from the KL divergence
only by the target's own entropy. Rows are padded on the right, where a causal model sees nothing of
the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from harness.drafting.heads.blocks import Head
from harness.drafting.heads.training_batch import DECAY, TrainingBatch, soft_loss
from harness.drafting.parallel import mask_token
from harness.runners.base import run_model

Loss = Callable[[TrainingBatch], Tensor]

# How many tokens of each row are followed by masks, to train a parallel draft model.
ANCHORS = 8


@torch.no_grad()
def training_batch(
    target: PreTrainedModel,
    tokens: Tensor,
    is_learned: Tensor,
    layers: tuple[int, ...],
    vocabulary_size: int,
) -> TrainingBatch:
    """Run the target on texts.

    Args:
        tokens: [B, n], padded on the right.
        is_learned: [B, n], whether the target's distribution after a token is to be learned.
        layers: the target's layers whose hidden states a head reads; () for a draft model.
        vocabulary_size: of both models; outputs beyond it only pad their matrices.
    """
    outputs = run_model(target, {"hidden_layers": layers}, tokens, DynamicCache())
    logits = outputs[0]
    probabilities = logits[..., :vocabulary_size].float().softmax(-1)
    hidden = outputs[1] if layers else None
    return TrainingBatch(tokens, is_learned, probabilities, hidden)


def loss_of(module: nn.Module, target: PreTrainedModel, num_steps: int) -> Loss:
    """Return the function from batches to losses that trains a head or a draft model.

    Args:
        num_steps: how many tokens ahead a head or a parallel draft model is trained to draft.
    """
    if isinstance(module, Head):
        # A head borrows the target's embedding if it has none.
        embedding: Any = module.embed_tokens or target.get_input_embeddings()
        output: Any = module.lm_head or target.get_output_embeddings()
        return lambda batch: module.loss(batch, embedding, output, num_steps)
    draft: Any = module
    mask = mask_token(draft.config)
    if mask is not None and num_steps > 1:
        return lambda batch: parallel_loss(module, batch, mask, num_steps - 1)
    return lambda batch: batch.loss(draft(input_ids=batch.tokens, use_cache=False).logits, ahead=0)


def parallel_loss(module: nn.Module, batch: TrainingBatch, mask: int, num_masks: int) -> Tensor:
    """Return the loss of a parallel draft model, in one pass over texts and masks.

    Masks follow some tokens of each row, its anchors, drawn again for each batch. They see the text
    up to their anchor and the masks between, as when they draft. With the text a b c d e, the
    anchor b and two masks, the first mask takes the position of c and learns what follows c, and
    the second that of d; both see a and b, and the second also sees the first.
    """
    num_rows, length = batch.tokens.shape
    device = batch.tokens.device
    num_masks = min(num_masks, length - 1)
    # A row without a token that counts draws from all, as a distribution needs some mass.
    weights_of_anchors = batch.is_learned[:, : length - num_masks].float() + 1e-9
    anchors = torch.multinomial(weights_of_anchors, ANCHORS, replacement=True)

    ahead = torch.arange(1, num_masks + 1, device=device)
    mask_positions = (anchors.unsqueeze(2) + ahead).flatten(1)
    masks = torch.full_like(mask_positions, mask)
    text_positions = torch.arange(length, device=device).expand(num_rows, -1)
    seen = _seen(text_positions, anchors, num_masks)
    dtype = next(module.parameters()).dtype
    added_to_scores = torch.zeros(seen.shape, dtype=dtype, device=device)
    added_to_scores = added_to_scores.masked_fill(~seen, torch.finfo(dtype).min)
    logits = module(
        input_ids=torch.cat([batch.tokens, masks], dim=1),
        position_ids=torch.cat([text_positions, mask_positions], dim=1),
        attention_mask=added_to_scores.unsqueeze(1),
        use_cache=False,
    ).logits

    text_loss = batch.loss(logits[:, :length], ahead=0)
    rows = torch.arange(num_rows, device=device).unsqueeze(1)
    probabilities = batch.target_probabilities[rows, mask_positions]
    weights = batch.is_learned[rows, mask_positions] * DECAY ** ahead.repeat(ANCHORS)
    mask_loss = soft_loss(logits[:, length:], probabilities, weights)
    return text_loss + mask_loss


def _seen(text_positions: Tensor, anchors: Tensor, num_masks: int) -> Tensor:
    """Return which of n tokens and m masks each of them sees, [B, n + m, n + m] bool.

    Args:
        text_positions: [B, n].
        anchors: [B, ANCHORS], each followed by `num_masks` masks.
    """
    num_rows, length = text_positions.shape
    last_seen = anchors.repeat_interleave(num_masks, dim=1)
    last_text = torch.cat([text_positions, last_seen], dim=1)
    sees_text = text_positions.unsqueeze(1) <= last_text.unsqueeze(2)

    numbers = torch.arange(last_seen.shape[1], device=text_positions.device)
    groups = numbers // num_masks
    same_group = groups.unsqueeze(1) == groups
    not_ahead = numbers <= numbers.unsqueeze(1)
    # No token of the text sees a mask.
    sees_masks = nn.functional.pad(same_group & not_ahead, (0, 0, length, 0))
    sees_masks = sees_masks.expand(num_rows, -1, -1)
    return torch.cat([sees_text, sees_masks], dim=2)
