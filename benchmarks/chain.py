"""Pairs of full-size models with random weights that agree on a chosen share of tokens.

Random models agree on nothing, and a rejection at every token says little about any decoder. So the embeddings and the
output layer of both are set such that every token has one successor, which differs in the draft for a chosen share of
tokens. The norms of the layers between are zero, so that these do all their work and change nothing. Every decoder,
ours or a peer's, then sees the same acceptance by its own rule, and runs the same kernels as with trained weights.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

# The successor's logit above all others, enough to decide at any temperature in use.
_LOGIT = 60.0


@torch.no_grad()
def link(
    target: PreTrainedModel, draft: PreTrainedModel | None, agreement: float, seed: int = 0
) -> None:
    """Set the weights of both, in place; they must have Llama's names. Tied embeddings are untied: the
    output matrix leads to the successor of what the embedding reads.

    Args:
        agreement: share of tokens for which both have the same successor.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(model.config.vocab_size for model in (target, draft) if model is not None)
    successors = torch.randperm(size, generator=generator)
    _set_successors(target, successors, generator)
    if draft is None:
        return
    astray = torch.randperm(size, generator=generator)[: round((1 - agreement) * size)]
    others = successors.clone()
    others[astray] = successors[astray.roll(1)]
    _set_successors(draft, others, generator)


def _set_successors(
    model: PreTrainedModel, successors: torch.Tensor, generator: torch.Generator
) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.zero_()
        elif name.endswith("model.norm.weight"):
            parameter.fill_(1.0)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if output is embedding:
        output = nn.Parameter(embedding.clone(), requires_grad=False)
        model.get_output_embeddings().weight = output
        model.config.tie_word_embeddings = False
    states = torch.randn(successors.numel(), embedding.shape[1], generator=generator)
    states /= states.square().mean(-1, keepdim=True).sqrt()  # as the last norm leaves them
    embedding[: successors.numel()] = states.to(embedding)
    output.zero_()
    output[successors.to(output.device)] = (_LOGIT / embedding.shape[1] * states).to(output)
