"""DFlash 2 heads computed once more in plain torch, without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import VOCABULARY
from harness.local.drafting.heads.corrected import DFlash2
from head_references import Expected, attend, mlp, rms


def convolved(convolutions: Any, side: int, reads: Tensor, states: Tensor) -> Tensor:
    """Position by position: `reads` [block, D] give the kernels of `states` [block, D]."""
    base = convolutions.base_kernel[side]
    num_taps, width = base.shape
    changes = reads @ convolutions.kernel_projection.weight.T
    outputs = torch.zeros_like(states)
    for place in range(len(states)):
        change = changes[place].view(2, num_taps, width // 8)[side]
        for tap in range(min(num_taps, place + 1)):
            weights = base[tap].view(-1, 8) + change[tap].unsqueeze(1)
            outputs[place] += weights.flatten() * states[place - tap]
    return outputs


def block_states(head: DFlash2, target: PreTrainedModel, last: Tensor, features: Tensor) -> Tensor:
    """The states [block, D] of one block, after the final norm."""
    size, length = head.config.block_size, len(features)
    context = rms(head.fc(features.flatten(1)), head.hidden_norm)
    queries = torch.cat([last.view(1), torch.full((size - 1,), head.config.mask_token_id)])
    states = target.get_input_embeddings()(queries)
    at, block_at = torch.arange(length + size), torch.arange(length, length + size)
    layer: Any
    for layer, window in zip(head.layers, head.windows, strict=True):
        seen = torch.ones(size, length + size, dtype=torch.bool)
        if window is not None and head.config.windows_follow:
            seen &= block_at[:, None] - at < window
        elif window is not None:
            seen &= at >= length - window
        if head.config.causal or (window is not None and head.config.causal_windows):
            seen &= at <= block_at[:, None]
        normed = rms(states, layer.input_layernorm)
        mixed = convolved(layer.attention_conv, 0, normed, normed)
        keys = torch.cat([context, mixed])
        attended = attend(layer.self_attn, mixed, keys, block_at, at, seen)
        states = states + convolved(layer.attention_conv, 1, normed, attended)
        normed = rms(states, layer.post_attention_layernorm)
        mixed = convolved(layer.mlp_conv, 0, normed, normed)
        states = states + convolved(layer.mlp_conv, 1, normed, mlp(layer, mixed))
    return rms(states, head.norm)


def path_expected(head: DFlash2, target: PreTrainedModel) -> Expected:
    """Log-probabilities of the candidates at each position, after the token drawn before it."""
    output = target.get_output_embeddings()
    selector = head.candidate_selector

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        states = block_states(head, target, decided[-1], features)[1:]
        rows = []
        before = decided[-1]
        for state, token in zip(states, drawn, strict=False):
            logits = output(state)
            scores = torch.full((VOCABULARY,), -torch.inf)
            for candidate in logits.argsort(descending=True)[: head.config.num_candidates]:
                context = selector.predecessor_codebook[before] * selector.hidden_projection(state)
                follows = (context * selector.successor_codebook[candidate]).sum()
                scores[candidate] = logits[candidate] + follows
            rows.append(scores.log_softmax(-1))
            before = token
        return torch.stack(rows)

    return expected
