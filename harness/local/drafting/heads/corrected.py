"""Heads that correct what each state of a block predicts by the tokens drawn before it, without another
pass: by a bias (DSpark), a selector (DFlash 2) or a recurrent unit (Domino).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.local.drafting.heads.block import DFlash, DFlashConfig
from harness.local.drafting.heads.head import Draft, Draw, stacked
from harness.local.drafting.heads.stored import StoredHead


class CorrectedBlock(DFlash):
    """A DFlash head whose tokens are drawn one after the other."""

    def correct(
        self, states: Tensor, logits: Tensor, before: Tensor, index: int, memory: Any
    ) -> tuple[Tensor, Any]:
        """Return logits [B, V of the head] of the token at an index, and what the next one is to
        know.

        Args:
            states, logits: [B, width] and [B, V of the head], of the block at this index.
            before: [B], the token before it.
            memory: what was returned for the one before; None at the first one.
        """
        raise NotImplementedError

    def draw_block(self, anchor: Tensor, states: Tensor, uniforms: Tensor, draw: Draw) -> Draft:
        logits = self.logits(states)
        drawn: list[Draft] = []
        before = anchor
        memory: Any = None
        for index, uniform in enumerate(uniforms.unbind(1)):
            corrected, memory = self.correct(
                states[:, index], logits[:, index], before, index, memory
            )
            drawn.append(draw(corrected, uniform))
            before = drawn[-1].tokens
        return stacked(drawn)


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """A configuration with the options of DSpark; `confidence` is one of every head.

    Attributes:
        markov_rank: the width of the Markov head's embeddings; 0 without a Markov head.
        confidence_markov: whether the confidence head reads the embedding of the token before, too.
    """

    markov_rank: int
    confidence_markov: bool


class DSpark(CorrectedBlock):
    """DSpark, as speculators, DeepSpec and SpecForge (in z-lab's format) store it.

    Its Markov head adds to the logits a bias that depends on the token before. Its confidence head
    estimates, for each token, the chance that it is accepted if those before it are. A head may lack
    either of the two.
    """

    name = "dspark"
    title = "DSpark"
    config_type = DSparkConfig
    config: DSparkConfig
    default_from_anchor = True

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        named = stored.named
        rank = named.get("markov_rank", 256 if stored.is_speculators else 0)
        kind = named.get("markov_head_type", "vanilla")
        if rank and kind != "vanilla":
            raise stored.refused(f"has a Markov head of type {kind}; vanilla is supported")
        is_confident = named.get("enable_confidence_head", stored.is_speculators)
        reads_token = is_confident and named.get("confidence_head_with_markov", True)
        return super().fields(stored) | {
            "markov_rank": rank,
            "confidence": is_confident,
            "confidence_markov": reads_token and rank > 0,
        }

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        self.markov_head: nn.ModuleDict | None = None
        self.confidence_head: nn.ModuleDict | None = None
        if rank:
            previous = nn.Embedding(config.vocabulary_size, rank)
            following = nn.Linear(rank, config.draft_vocabulary_size, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": previous, "markov_w2": following})
        if config.confidence:
            width = self.fc.out_features + (rank if config.confidence_markov else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})

    def correct(
        self, states: Tensor, logits: Tensor, before: Tensor, index: int, memory: Any
    ) -> tuple[Tensor, Any]:
        if self.markov_head is not None:
            bias = self.markov_head["markov_w2"](self.markov_head["markov_w1"](before))
            logits = logits + bias
        return logits, None

    def draw_block(self, anchor: Tensor, states: Tensor, uniforms: Tensor, draw: Draw) -> Draft:
        """The chances depend on the tokens before each, never on the token itself, so that
        verification stays lossless.
        """
        draft = super().draw_block(anchor, states, uniforms, draw)
        if self.confidence_head is None:
            return draft
        if self.config.confidence_markov:
            assert self.markov_head is not None
            before = torch.cat([anchor.unsqueeze(1), draft.tokens[:, :-1]], dim=1)
            states = torch.cat([states, self.markov_head["markov_w1"](before)], dim=-1)
        chances = self.confidence_head["proj"](states).squeeze(-1).float().sigmoid()
        return draft._replace(chances=chances)


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """A configuration with the options of DFlash 2.

    Attributes:
        num_taps: positions that a convolution reads, its own and those before it.
        group_size: channels that share the part of a kernel that depends on the input.
        selector_rank: width of the selector's embeddings.
        num_candidates: tokens that the selector keeps at each position.
    """

    num_taps: int
    group_size: int
    selector_rank: int
    num_candidates: int


class DFlash2(CorrectedBlock):
    """DFlash 2 (z-lab and Inco AI 2026), as speculators and z-lab store it.

    Each layer convolves the inputs and the outputs of its attention and of its MLP over the positions
    of a block. At every position a selector keeps the likeliest tokens, and adds to their logits how
    well each follows the token before.
    """

    name = "dflash2"
    title = "DFlash 2"
    config_type = DFlash2Config
    config: DFlash2Config
    default_causal_windows = False

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        named = stored.named
        without_effect = {
            "input_embedding_scale": 1,
            "output_multiplier": 1,
            "final_logit_softcapping": None,
        }
        for key, value in without_effect.items():
            if named.get(key, value) != value:
                raise stored.refused(f"has {key}={named[key]}, which is not supported")
        fields = super().fields(stored)
        size = fields["vocabulary_size"]
        if fields["draft_vocabulary_size"] != size:
            raise stored.refused("drafts some of the target's tokens only, which is not supported")
        return fields | {
            "num_taps": named.get("conv_kernel_size", 2),
            "group_size": named.get("conv_group_size", 16),
            "selector_rank": named.get("selector_rank", 256),
            "num_candidates": min(named.get("selector_top_k", 16), size),
        }

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        layer: Any
        for layer in self.layers:
            layer.attention_conv = _Convolutions(config, self.fc.out_features)
            layer.mlp_conv = _Convolutions(config, self.fc.out_features)
        self.candidate_selector = _Selector(config, self.fc.out_features)

    def pass_layer(self, layer: Any, states: Tensor, attention_inputs: Mapping[str, Any]) -> Tensor:
        def attend(inputs: Tensor) -> Tensor:
            return layer.self_attn(hidden_states=inputs, **attention_inputs)[0]

        normed = layer.input_layernorm(states)
        states = states + layer.attention_conv(attend, normed)
        normed = layer.post_attention_layernorm(states)
        return states + layer.mlp_conv(layer.mlp, normed)

    def correct(
        self, states: Tensor, logits: Tensor, before: Tensor, index: int, memory: Any
    ) -> tuple[Tensor, Any]:
        """Other tokens than the candidates have -inf."""
        logits = logits.float()
        likeliest, candidates = logits.topk(self.config.num_candidates)
        scores = likeliest + self.candidate_selector(states, before, candidates)
        return torch.full_like(logits, -torch.inf).scatter_(-1, candidates, scores), None


class _Convolutions(nn.Module):
    """Two convolutions over a block's positions: of the input and of the output of a part of a
    layer.

    With two taps, what comes out at a position is kernel[0] times its own state plus kernel[1]
    times the state before it, channel by channel. The kernel is `base_kernel`, plus what
    `kernel_projection` makes of the part's input at the position, for each group of channels.
    """

    def __init__(self, config: DFlash2Config, width: int) -> None:
        super().__init__()
        self._num_taps = config.num_taps
        self._group_size = config.group_size
        num_groups = width // config.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, config.num_taps, width))
        self.kernel_projection = nn.Linear(width, 2 * config.num_taps * num_groups, bias=False)

    def forward(self, part: Any, inputs: Tensor) -> Tensor:
        """Convolve inputs [B, block, width], apply `part`, and convolve what it returns."""
        # [B, block, 2, taps, groups], for the input and for the output.
        by_group = self.kernel_projection(inputs).unflatten(-1, (2, self._num_taps, -1))
        kernels = self.base_kernel + by_group.repeat_interleave(self._group_size, dim=-1)
        input_kernel, output_kernel = kernels.unbind(2)
        return self._convolved(part(self._convolved(inputs, input_kernel)), output_kernel)

    def _convolved(self, states: Tensor, kernel: Tensor) -> Tensor:
        """Convolve states [B, block, width] by a kernel [B, block, taps, width].

        Before the first position of the block there are zeros.
        """
        total = torch.zeros_like(states)
        for tap in range(self._num_taps):
            earlier = nn.functional.pad(states, (0, 0, tap, 0))[:, : states.shape[1]]
            total = total + kernel[:, :, tap] * earlier
        return total


class _Selector(nn.Module):
    """Scores how well a token follows another one, given the state that predicts it.

    A score is predecessor * projected state * successor, summed over the rank.
    """

    def __init__(self, config: DFlash2Config, width: int) -> None:
        super().__init__()
        shape = config.vocabulary_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(shape))
        self.successor_codebook = nn.Parameter(torch.empty(shape))
        self.hidden_projection = nn.Linear(width, config.selector_rank, bias=False)

    def forward(self, states: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Score candidates [B, C] after tokens `before` [B], by the states [B, width]."""
        context = self.predecessor_codebook[before] * self.hidden_projection(states)
        return (self.successor_codebook[candidates] @ context.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class DominoConfig(DFlashConfig):
    """A configuration with the options of Domino.

    Attributes:
        num_uncorrected: tokens at the beginning of a block whose logits stay as they are.
        recurrent_size: width of the recurrent unit's state.
        inner_size: width between the two matrices.
    """

    num_uncorrected: int
    recurrent_size: int
    inner_size: int


class Domino(CorrectedBlock):
    """Domino (SpecForge 2026), as SpecForge stores it: in z-lab's format, with `projector_type`.

    A gated recurrent unit reads the embeddings of the anchor and of the tokens drawn so far in a
    block. From its state and the block's own, two matrices make what is added to the logits.
    """

    name = "domino"
    title = "Domino"
    config_type = DominoConfig
    config: DominoConfig

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        return super().fields(stored) | {
            # With labels shifted in training the anchor predicts, too. Taken the wrong way, every draft
            # token is the one before its place, and nothing is accepted.
            "from_anchor": stored.named.get("shift_label", False),
            "num_uncorrected": stored.named.get("pure_draft_prefix_len", 0),
            "recurrent_size": stored.required("gru_hidden_dim"),
            "inner_size": stored.required("emb_dim"),
        }

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        width = self.fc.out_features
        self.prefix_gru = nn.GRU(width, config.recurrent_size, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + config.recurrent_size, config.inner_size, bias=False),
            nn.SiLU(),
            nn.Linear(config.inner_size, config.draft_vocabulary_size, bias=False),
        )

    def correct(
        self, states: Tensor, logits: Tensor, before: Tensor, index: int, memory: Any
    ) -> tuple[Tensor, Any]:
        _, memory = self.prefix_gru(self.embed(before).unsqueeze(0), memory)
        if index >= self.config.num_uncorrected:
            logits = logits + self.embed_proj(torch.cat([states, memory[0]], dim=-1))
        return logits, memory
