"""Draft heads computed once more in plain torch, without caches, and comparisons with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import VOCABULARY, generated
from chains import GREEDY, request, texts
from harness.local.decoding.adaptive import DraftLength
from harness.local.decoding.protocols import Drafter, Proposal, Step
from harness.local.decoding.warp import Warp
from harness.local.models.checkpoints import recurrent_kind
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from loops import speculative

PROMPTS = [[5, 9, 3, 4, 7, 1, 8], [11, 3], [10, 1, 6, 3, 4, 5, 6, 7, 8, 9, 20]]

# log-probabilities [K, V] for a row, from its decided tokens, its drawn tokens and the target's features [n, L, D]
Expected = Callable[[Tensor, Tensor, Tensor], Tensor]


class Checked(Drafter):
    """Another drafter, each of whose distributions is compared with a plain computation of it."""

    def __init__(self, drafter: Drafter, target: PreTrainedModel, expected: Expected) -> None:
        self.layers, self._drafter, self._target, self._expected = (
            drafter.layers,
            drafter,
            target,
            expected,
        )
        self.rows: list[list[int]] = []
        self.error, self.num_accepted = 0.0, set[int]()

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self.rows = [[*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        self.offered: list[list[int]] = [[] for _ in prompts]
        self._drafter.start(prompts, first_tokens, step)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        proposal = self._drafter.propose(num_draft_tokens, uniforms)
        self.offered = proposal.tokens.tolist()
        assert proposal.probabilities is not None
        for row, tokens, probabilities in zip(
            self.rows, proposal.tokens, proposal.probabilities, strict=True
        ):
            decided = torch.tensor(row)
            states = self._target(
                input_ids=decided[None, :-1], output_hidden_states=True
            ).hidden_states
            features = torch.stack([states[layer][0] for layer in self.layers], dim=1)
            expected = self._expected(decided, tokens, features)
            assert expected.shape == probabilities.shape
            assert (probabilities.gather(1, tokens[:, None]) > 0).all()
            error = (probabilities.log() - expected)[expected > -torch.inf].abs().max().item()
            assert (probabilities == 0).equal(expected == -torch.inf)
            self.error = max(self.error, error)
        return proposal

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        for row, tokens, count, following in zip(
            self.rows, self.offered, num_accepted, next_tokens, strict=True
        ):
            row += [*tokens[:count], following]
        self.num_accepted |= set(num_accepted)
        self._drafter.observe(num_accepted, next_tokens, step)

    def select(self, rows: Sequence[int]) -> None:
        self.rows, self.offered = (
            [self.rows[row] for row in rows],
            [self.offered[row] for row in rows],
        )
        self._drafter.select(rows)


def check_against(
    target: PreTrainedModel, drafter: Drafter, expected: Expected, k: int | DraftLength = 4
) -> None:
    """Ragged rows that accept different numbers of tokens and end at different times."""
    checked = Checked(drafter, target, expected)
    what = request(PROMPTS, Warp(), length=40, stop=range(60, 63))
    has_state = recurrent_kind(target.config) is not None
    runner = (SnapshotRunner if has_state else StaticRunner)(target, hidden_layers=drafter.layers)
    iterations = list(speculative(runner, checked, what, k))
    assert len({len(iteration.rows) for iteration in iterations}) > 1
    assert len(checked.num_accepted) >= 3
    assert checked.error < 1e-4, checked.error


def check_greedy(
    target: PreTrainedModel, drafter: Drafter, k: int = 3, prompts: list[list[int]] = PROMPTS
) -> None:
    """On the runner with fixed slots, twice with one drafter."""
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    what = request(prompts, GREEDY, length=20)
    expected = [generated(target, prompt, 20) for prompt in prompts]
    for _ in range(2):
        assert texts(speculative(runner, drafter, what, k), len(prompts)) == expected


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """x [n, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** -(torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )


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
