"""DFlash and DSpark heads computed once more in plain torch, without a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.local.drafting.heads.block import DFlash
from harness.local.drafting.heads.corrected import Domino, DSpark
from head_references import Expected, attend, mlp, rms, spread


def block_states(head: DFlash, target: PreTrainedModel, last: Tensor, features: Tensor) -> Tensor:
    """The states [block, D] of one block, after the final norm."""
    size, length = head.config.block_size, len(features)
    context = rms(head.fc(features.flatten(1)), head.hidden_norm)
    queries = torch.cat([last.view(1), torch.full((size - 1,), head.config.mask_token_id)])
    states = target.get_input_embeddings()(queries)
    at, block_at = torch.arange(length + size), torch.arange(length, length + size)
    for layer, window in zip(head.layers, head.windows, strict=True):
        seen = torch.ones(size, length + size, dtype=torch.bool)
        if window is not None:
            follows = head.config.windows_follow
            seen &= at >= (block_at[:, None] - window + 1 if follows else length - window)
            if head.config.causal_windows:
                seen &= at <= block_at[:, None]
        if head.config.causal:
            seen &= at <= block_at[:, None]
        x = rms(states, layer.input_layernorm)
        states = states + attend(layer.self_attn, x, torch.cat([context, x]), block_at, at, seen)
        states = states + mlp(layer, rms(states, layer.post_attention_layernorm))
    return rms(states, head.norm)


def block_expected(head: DFlash, target: PreTrainedModel) -> Expected:
    output = head.lm_head or target.get_output_embeddings()

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        states = block_states(head, target, decided[-1], features)
        logits = output(states if head.config.from_anchor else states[1:])[: len(drawn)]
        if isinstance(head, DSpark) and head.markov_head is not None:
            before = torch.cat([decided[-1:], drawn[:-1]])
            logits = (
                logits
                + head.markov_head["markov_w1"].weight[before]
                @ head.markov_head["markov_w2"].weight.T
            )
        if isinstance(head, Domino):
            # The unit reads the anchor and the tokens drawn before each place, by torch's own module.
            before = target.get_input_embeddings()(torch.cat([decided[-1:], drawn[:-1]]))
            memory, _ = head.prefix_gru(before[:, None])
            own = states if head.config.from_anchor else states[1:]
            features = torch.cat([own[: len(drawn)], memory[:, 0]], dim=-1)
            first = head.config.num_uncorrected
            logits = torch.cat([logits[:first], (logits + head.embed_proj(features))[first:]])
        return spread(head, logits)

    return expected
