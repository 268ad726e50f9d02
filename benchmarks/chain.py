"""Makes pairs of full-size models with random weights agree on a chosen share of tokens.

Random models agree on nothing, and a rejection at every token shows little about a decoder. So the embeddings and the
output layers of both models are set such that every token has a single successor, and that the draft has another
successor for a chosen share of tokens. The norms of the layers in between are set to zero: these layers then do all
their work, but change nothing. So every decoder, ours or another, gets the same acceptance by its own rule, and runs
the same kernels as with trained weights.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

# The successor's logit exceeds all others by about this much, which is enough at any temperature in use.
_LOGIT = 60.0


@torch.no_grad()
def link(
    target: PreTrainedModel, draft: PreTrainedModel | None, agreement: float, seed: int = 0
) -> None:
    """Set the weights of both models in place. Their parameters must have the names of Llama's.

    Tied embeddings are untied, because the output matrix must lead to a token's successor, not to the token.

    Args:
        draft: the draft; None to set the target's weights alone.
        agreement: the share of tokens for which both models have the same successor.
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
    # Their root mean square is 1, so that the last norm does not change them.
    states /= states.square().mean(-1, keepdim=True).sqrt()
    embedding[: successors.numel()] = states.to(embedding)
    output.zero_()
    output[successors.to(output.device)] = (_LOGIT / embedding.shape[1] * states).to(output)
