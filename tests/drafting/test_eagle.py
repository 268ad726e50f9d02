"""EAGLE-3 and P-EAGLE against a slow computation without a cache, and their output against `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from architectures import VOCABULARY, generated, random_model
from decoding.test_adaptive import Scripted
from decoding.test_loops import GREEDY, request, texts
from harness.decoding.adaptive import DraftLength
from harness.decoding.loops import speculative
from harness.decoding.protocols import Drafter, Proposal, Step
from harness.decoding.warp import Warp
from harness.drafting.eagle import EagleConfig, EagleHead
from harness.runners.compiled import PreparedRunner
from harness.runners.eager import EagerRunner

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
    iterations = list(
        speculative(EagerRunner(target, hidden_layers=drafter.layers), checked, what, k)
    )
    assert len({len(iteration.rows) for iteration in iterations}) > 1
    assert len(checked.num_accepted) >= 3
    assert checked.error < 1e-4, checked.error


def check_greedy(target: PreTrainedModel, drafter: Drafter, k: int = 3) -> None:
    """On the runner with fixed slots, before and after it is prepared; one after the other with one drafter."""
    runner = PreparedRunner(target, compiled=False, captured=False, hidden_layers=drafter.layers)
    what = request(PROMPTS, GREEDY, length=20)
    actual = texts(speculative(runner, drafter, what, k), len(PROMPTS))
    runner.prepare(len(PROMPTS), 48, (1, k + 1))
    assert texts(speculative(runner, drafter, what, k), len(PROMPTS)) == actual
    assert actual == [generated(target, prompt, 20) for prompt in PROMPTS]


def target_model(model_type: str = "llama") -> PreTrainedModel:
    """Its distributions are flat enough for a random head to be accepted now and then."""
    target = random_model("llama", model_type=model_type, head_dim=8)
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(0.15)
    return target


def layer_config(model_type: str, num_layers: int = 1, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(
        model_type, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, **changes,
    )  # fmt: skip


def randomize(head: torch.nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            norm = "norm" in name
            parameter.normal_(mean=1.0 if norm else 0.0, std=0.2)
    head.eval().requires_grad_(False)


def eagle_head(transformer: PreTrainedConfig, reduced: bool = False, **changes: Any) -> EagleHead:
    config = EagleConfig(
        layers=(1, 2, 3),
        target_size=32,
        vocabulary_size=VOCABULARY,
        draft_vocabulary_size=60 if reduced else VOCABULARY,
        transformer=transformer,
        **{"own_embedding": True, "own_output": True, **changes},
    )
    head = EagleHead(config)
    randomize(head)
    if head.d2t is not None:
        head.d2t.copy_(
            torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:60]
            - torch.arange(60)
        )
    return head


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


def run_layers(head: EagleHead, embedded: Tensor, states: Tensor) -> Tensor:
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


def joined(head: EagleHead, features: Tensor) -> Tensor:
    if head.input_norm is not None:
        features = rms(features.flatten(-2), head.input_norm).view_as(features)
    if head.fc_norm is not None:
        parts = [rms(features[:, i], norm) for i, norm in enumerate(head.fc_norm)]
        features = torch.stack(parts, dim=1)
    return head.fc(features.flatten(-2))


def eagle_expected(head: EagleHead, embedding: Any, output: Any) -> Expected:
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

    return parallel if head.config.mask_token_id is not None else chain


@pytest.mark.parametrize(
    ("style", "changes"),
    [
        ("llama", {}),
        ("llama", {"reduced": True, "norm_before_residual": True, "norm_before_fc": True}),
        (
            "qwen3",
            {"fc_norm": True, "norm_output": True, "own_embedding": False, "own_output": False},
        ),
        ("llama", {"mask_token_id": 96, "reduced": True}),
    ],
    ids=["plain", "reduced vocabulary", "3.1, the target's vocabulary", "P-EAGLE"],
)
def test_distributions_equal_those_without_a_cache(style: str, changes: dict[str, Any]) -> None:
    target = target_model()
    head = eagle_head(layer_config(style, 3 if "mask_token_id" in changes else 1), **changes)
    embedding = head.embed_tokens or target.get_input_embeddings()
    output = head.lm_head or target.get_output_embeddings()
    check_against(target, head.drafter(target, Warp()), eagle_expected(head, embedding, output))


def test_a_sliding_window_and_a_second_layer() -> None:
    kinds = ["full_attention", "sliding_attention"]
    transformer = layer_config(
        "qwen3", 2, layer_types=kinds, use_sliding_window=True, sliding_window=5
    )
    target, head = target_model(), eagle_head(transformer)
    assert head.windows == [None, 5]
    check_against(
        target, head.drafter(target, Warp()), eagle_expected(head, head.embed_tokens, head.lm_head)
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("mask_token_id", [None, 96])
def test_greedy_output_is_that_of_generate(model_type: str, mask_token_id: int | None) -> None:
    target = target_model(model_type)
    check_greedy(
        target,
        eagle_head(layer_config(model_type), mask_token_id=mask_token_id).drafter(target, GREEDY),
    )


@pytest.mark.parametrize("mask_token_id", [None, 96])
def test_what_is_decided_without_a_proposal_is_read_as_well(
    mask_token_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.drafting.blocks.MOST_UNREAD", 8)
    target, head = target_model(), eagle_head(layer_config("llama"), mask_token_id=mask_token_id)
    expected = eagle_expected(head, head.embed_tokens, head.lm_head)
    check_against(target, head.drafter(target, Warp()), expected, Scripted([0, 0, 4, 0, 3, 4]))
