"""What a draft is trained on: to predict what the target would, from what it will have when it drafts.

All of these are cross-entropies against the target's whole distribution, which differs from the KL divergence only by
the target's own entropy. Rows are padded on the right, where a causal model sees nothing of the padding.
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
    """One forward pass of the target; its distributions are cut to the first `size` tokens."""
    logits, *hidden = run_model(target, {"hidden_layers": layers}, tokens, DynamicCache())
    return Lesson(
        tokens, counts, logits[..., :size].float().softmax(-1), hidden[0] if hidden else None
    )


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
