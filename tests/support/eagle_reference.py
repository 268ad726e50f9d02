"""EAGLE-3 and P-EAGLE heads computed once more in plain torch, without a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.local.drafting.heads.eagle import Eagle3, PEagle
from head_references import Expected, attend, mlp, rms, spread


def run_layers(head: Eagle3, embedded: Tensor, states: Tensor) -> Tensor:
    """All entries [n, D], causal, without a cache."""
    at = torch.arange(len(states))
    seen = at[:, None] >= at
    for index, (layer, window) in enumerate(zip(head.layers, head.windows, strict=True)):
        visible = seen if window is None else seen & (at[:, None] - at < window)
        normed, x = states, rms(states, layer.input_layernorm)
        if index == 0:
            normed = rms(states, layer.hidden_norm)
            x = torch.cat([rms(embedded, layer.input_layernorm), normed], dim=-1)
        residual = normed if head.config.norm_before_residual and index == 0 else states
        states = residual + attend(layer.self_attn, x, x, at, at, visible)
        states = states + mlp(layer, rms(states, layer.post_attention_layernorm))
    return states


def joined(head: Eagle3, features: Tensor) -> Tensor:
    if head.input_norm is not None:
        features = rms(features.flatten(-2), head.input_norm).view_as(features)
    if head.fc_norm is not None:
        parts = [rms(features[:, i], norm) for i, norm in enumerate(head.fc_norm)]
        features = torch.stack(parts, dim=1)
    return head.fc(features.flatten(-2))


def eagle_expected(head: Eagle3, target: PreTrainedModel) -> Expected:
    embedding = head.embed_tokens or target.get_input_embeddings()
    output = head.lm_head or target.get_output_embeddings()

    def chain(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        embedded, states, found = embedding(decided[1:]), joined(head, features), []
        for token in drawn:
            last = run_layers(head, embedded, states)[-1]
            normed = rms(last, head.norm)
            found.append(spread(head, output(normed)))
            embedded = torch.cat([embedded, embedding(token)[None]])
            states = torch.cat([states, (normed if head.config.norm_output else last)[None]])
        return torch.stack(found)

    def parallel(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        masks = len(drawn) - 1
        mask_token = torch.full((masks,), head.config.mask_token_id)
        hidden = head.mask_hidden.view(1, *features.shape[1:]).expand(masks, -1, -1)
        states = joined(head, torch.cat([features, hidden]))
        states = run_layers(head, embedding(torch.cat([decided[1:], mask_token])), states)
        return spread(head, output(rms(states[-len(drawn) :], head.norm)))

    return parallel if isinstance(head, PEagle) else chain
