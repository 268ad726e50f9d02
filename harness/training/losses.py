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

from harness.drafting.blocks import Head
from harness.drafting.lesson import DECAY, Lesson, soft_loss
from harness.drafting.parallel import mask_token
from harness.runners.base import run_model

Loss = Callable[[Lesson], Tensor]

# Tokens of a row that masks follow, in a lesson of a parallel draft model.
ANCHORS = 8


@torch.no_grad()
def lesson(
    target: PreTrainedModel, tokens: Tensor, counts: Tensor, layers: tuple[int, ...], size: int
) -> Lesson:
    """Run the target on texts; its distributions are cut to the first `size` tokens.

    Args:
        tokens: [B, n], padded on the right.
        counts: [B, n], see `Lesson`.
        layers: the target's layers whose hidden states a head reads.
    """
    logits, *hidden = run_model(target, {"hidden_layers": layers}, tokens, DynamicCache())
    probabilities = logits[..., :size].float().softmax(-1)
    return Lesson(tokens, counts, probabilities, hidden[0] if hidden else None)


def loss_of(module: nn.Module, target: PreTrainedModel, num_steps: int) -> Loss:
    """The loss of a head or a draft model.

    Args:
        num_steps: tokens ahead that a chain is trained to draft.
    """
    if isinstance(module, Head):
        embedding: Any = module.embed_tokens or target.get_input_embeddings()
        output: Any = module.lm_head or target.get_output_embeddings()
        head = module
        return lambda lesson: head.loss(lesson, embedding, output, num_steps)
    draft: Any = module
    mask = mask_token(draft.config)
    if mask is not None and num_steps > 1:
        return lambda lesson: parallel_loss(module, lesson, mask, num_steps - 1)
    return lambda lesson: lesson.loss(module(input_ids=lesson.tokens, use_cache=False).logits, 0)


def parallel_loss(module: nn.Module, lesson: Lesson, mask: int, num_masks: int) -> Tensor:
    """The loss of a parallel draft model, in one pass over texts and masks.

    Masks follow some tokens of each row, chosen again for each lesson. They see the text up to that
    token and the masks between, as when they draft.
    """
    num_rows, length = lesson.tokens.shape
    device = lesson.tokens.device
    num_masks = min(num_masks, length - 1)
    possible = lesson.counts[:, : length - num_masks].float() + 1e-9
    anchors = torch.multinomial(possible, ANCHORS, replacement=True)
    ahead = torch.arange(1, num_masks + 1, device=device)
    places = (anchors.unsqueeze(2) + ahead).flatten(1)
    last_seen = anchors.repeat_interleave(num_masks, dim=1)
    masks = torch.full_like(places, mask)
    text_places = torch.arange(length, device=device).expand(num_rows, -1)
    logits = module(
        input_ids=torch.cat([lesson.tokens, masks], dim=1),
        position_ids=torch.cat([text_places, places], dim=1),
        attention_mask=_seen_by(text_places, last_seen, num_masks, next(module.parameters()).dtype),
        use_cache=False,
    ).logits
    of_text = lesson.loss(logits[:, :length], 0)
    rows = torch.arange(num_rows, device=device).unsqueeze(1)
    counts = lesson.counts[rows, places] * DECAY ** ahead.repeat(ANCHORS)
    of_masks = soft_loss(logits[:, length:], lesson.wanted[rows, places], counts)
    return of_text + of_masks


def _seen_by(text_places: Tensor, last_seen: Tensor, num_masks: int, dtype: torch.dtype) -> Tensor:
    """The attention mask [B, 1, n + m, n + m] of texts and masks, as numbers that are added.

    Args:
        text_places: [B, n].
        last_seen: [B, m], the last token of the text that each mask sees.
        num_masks: after one token.
    """
    length = text_places.shape[1]
    last_text = torch.cat([text_places, last_seen], dim=1)
    sees_text = text_places.unsqueeze(1) <= last_text.unsqueeze(2)
    of_masks = torch.arange(last_seen.shape[1], device=text_places.device)
    same_group = of_masks.unsqueeze(1) // num_masks == of_masks // num_masks
    sees_masks = same_group & (of_masks <= of_masks.unsqueeze(1))
    sees_masks = nn.functional.pad(sees_masks, (0, 0, length, 0))
    seen = torch.cat([sees_text, sees_masks.expand(len(text_places), -1, -1)], dim=2)
    unseen = torch.finfo(dtype).min
    return (
        torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        .masked_fill(~seen, unseen)
        .unsqueeze(1)
    )
