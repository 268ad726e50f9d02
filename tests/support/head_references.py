"""Draft heads computed once more in plain torch, without caches, and comparisons with them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import VOCABULARY
from chains import requests, speculative
from harness.local.decoding.protocols import Drafter, Proposal, Step
from harness.local.decoding.warp import Warp
from harness.local.drafting.heads.block import DFlash
from harness.local.drafting.heads.eagle import Eagle3
from harness.local.drafting.heads.medusa import Medusa
from harness.local.engine.reading import on_host
from harness.local.models.checkpoints import is_recurrent
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

PROMPTS = [[5, 9, 3, 4, 7, 1, 8], [11, 3], [10, 1, 6, 3, 4, 5, 6, 7, 8, 9, 20]]

# log-probabilities [K, V] for a row, from its decided tokens, its drawn tokens and the target's features [n, L, D]
Expected = Callable[[Tensor, Tensor, Tensor], Tensor]


class Checked(Drafter):
    """Another drafter, each of whose distributions is compared with a plain computation of it."""

    def __init__(self, drafter: Any, target: PreTrainedModel, expected: Expected) -> None:
        self.layers = drafter.layers
        self._drafter = on_host(drafter, 8, 256)
        self._target = target
        self._expected = expected
        self.rows: list[Any] = []
        self.error, self.num_accepted = 0.0, set[int]()

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self.rows = [[*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        self._drafter.start(prompts, first_tokens, step)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        proposal = self._drafter.propose(num_draft_tokens, uniforms)
        assert proposal.probabilities is not None
        for row, tokens, probabilities in zip(
            self.rows, proposal.tokens, proposal.probabilities, strict=True
        ):
            if row is None:
                continue
            decided = torch.tensor(row)
            output = self._target(input_ids=decided[None, :-1], output_hidden_states=True)
            states = output.hidden_states
            features = torch.stack([states[layer][0] for layer in self.layers or [0]], dim=1)
            expected = self._expected(decided, tokens, features)
            assert expected.shape == probabilities.shape
            assert (probabilities.gather(1, tokens[:, None]) > 0).all()
            error = (probabilities.log() - expected)[expected > -torch.inf].abs().max().item()
            assert (probabilities == 0).equal(expected == -torch.inf)
            self.error = max(self.error, error)
        return proposal

    def observe(
        self, num_accepted: Sequence[int], decided: Sequence[Sequence[int]], step: Step
    ) -> None:
        for number, (tokens, count) in enumerate(zip(decided, num_accepted, strict=True)):
            if len(tokens) <= count:
                self.rows[number] = None  # it has ended
            else:
                self.rows[number] += tokens
        self.num_accepted |= set(num_accepted)
        self._drafter.observe(num_accepted, decided, step)


def check_against(target: PreTrainedModel, drafter: Any, expected: Expected, k: int = 4) -> None:
    """Ragged rows that accept different numbers of tokens and end at different times."""
    checked = Checked(drafter, target, expected)
    what = requests(PROMPTS, Warp(), length=40, stop=range(60, 63))
    has_state = is_recurrent(target.config)
    runner = (SnapshotRunner if has_state else StaticRunner)(target, hidden_layers=drafter.layers)
    iterations = list(speculative(runner, checked, what, k))
    assert len({len(row_steps) for row_steps in iterations}) > 1
    assert len(checked.num_accepted) >= 3
    assert checked.error < 1e-4, checked.error


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """x [n, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** -(torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
    return torch.cat(turned, dim=-1)


def attend(
    attention: Any, queries: Tensor, keys: Tensor, q_at: Tensor, k_at: Tensor, seen: Tensor
) -> Tensor:
    """Attention of inputs [n, D] to inputs [m, D] at their positions; seen [n, m]."""
    q, k, v = attention.q_proj(queries), attention.k_proj(keys), attention.v_proj(keys)
    q, k, v = (x.view(len(x), -1, attention.head_dim) for x in (q, k, v))
    if hasattr(attention, "q_norm"):
        q, k = rms(q, attention.q_norm), rms(k, attention.k_norm)
    q, k = rotate(q, q_at), rotate(k, k_at)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) / attention.head_dim**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return attention.o_proj(torch.einsum("hnm,mhd->nhd", weights, v).flatten(1))


def mlp(layer: Any, x: Tensor) -> Tensor:
    gate = layer.mlp.gate_proj(x)
    return layer.mlp.down_proj(gate * gate.sigmoid() * layer.mlp.up_proj(x))


def spread(head: Any, logits: Tensor) -> Tensor:
    """Logits of the head -> log-probabilities over the target's vocabulary."""
    logs = logits.log_softmax(-1)
    if head.d2t is None:
        return logs
    full = torch.full((*logs.shape[:-1], VOCABULARY), -torch.inf)
    for index, offset in enumerate(head.d2t.tolist()):
        full[..., index + offset] = logs[..., index]
    return full


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

    return chain


def block_states(head: DFlash, target: PreTrainedModel, last: Tensor, features: Tensor) -> Tensor:
    """The states [block, D] of one block, after the final norm."""
    size, length = head.config.block_size, len(features)
    context = rms(head.fc(features.flatten(1)), head.hidden_norm)
    queries = torch.cat([last.view(1), torch.full((size - 1,), head.config.mask_token_id)])
    states = target.get_input_embeddings()(queries)
    at, block_at = torch.arange(length + size), torch.arange(length, length + size)
    layer: Any
    for layer, window in zip(head.layers, head.windows, strict=True):
        seen = torch.ones(size, length + size, dtype=torch.bool)
        if window is not None:
            follows = head.config.windows_follow
            seen &= at >= (block_at[:, None] - window + 1 if follows else length - window)
        if head.config.causal or (window is not None and head.config.causal_windows):
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
        if head.markov_head is not None:
            before = torch.cat([decided[-1:], drawn[:-1]])
            memory = head.markov_head["markov_w1"].weight[before]
            logits = logits + memory @ head.markov_head["markov_w2"].weight.T
        return spread(head, logits)

    return expected


def medusa_expected(head: Medusa, target: PreTrainedModel) -> Expected:
    weights = head.state_dict()
    num_blocks = head.config.num_blocks

    def output(number: int) -> Tensor:
        if head.config.output_per_head:
            return weights[f"{number}.{num_blocks}.weight"]
        return target.get_output_embeddings().weight

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        found = []
        for number in range(len(drawn)):
            x = features[-1, 0]
            for block in range(num_blocks):
                weight = weights[f"{number}.{block}.linear.weight"]
                linear = weight @ x + weights[f"{number}.{block}.linear.bias"]
                x = x + linear * linear.sigmoid()
            found.append((output(number) @ x).log_softmax(-1))
        return torch.stack(found)

    return expected
