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
from harness.drafting.lesson import Lesson
from harness.runners.base import run_model

Loss = Callable[[Lesson], Tensor]


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
    return lambda lesson: lesson.loss(module(input_ids=lesson.tokens, use_cache=False).logits, 0)
