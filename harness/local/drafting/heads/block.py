"""DFlash (Chen et al. 2026): a head that drafts a block of tokens in one pass.

A block is the token just decided, its anchor, and masks after it: these are the queries of a pass.
Every layer sees, as keys and values, the target's features at all decided tokens, and the other
queries of the block in both directions. Say the text ends with `a b`, and a block has four queries:

    features of ... a | b <mask> <mask> <mask>
                           c      d      e

Each mask predicts the token at its own index, without knowing the others. In DeepSpec's format and
in DSpark the anchor predicts too: then b predicts c, the first mask d, and so on (`from_anchor`).

A layer with a sliding window of w sees as many keys as in the code that trained it:

- speculators: the w tokens before the block, for all of its queries. These see each other up to
  their own position, unless `sliding_window_non_causal`.
- z-lab: w positions up to each query's own, and nothing after it, unless `is_causal` or
  `dflash_config.causal` say otherwise (then for all layers).

vLLM counts from each query in both formats.

What a state of the block predicts may be corrected by the tokens drawn before it, without another
pass (`CorrectedBlock`): by a bias (DSpark), a selector (DFlash 2) or a recurrent unit (Domino).

                          speculators                  z-lab                      DeepSpec
    known by              `speculators_model_type`     `dflash_config`            neither of them
    first token drafted   by a mask (DSpark: anchor)   by a mask (DSpark: anchor) by the anchor
    sliding window from   the anchor                   each query                 there is none
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from harness.local.drafting.heads.head import (
    Draft,
    Draw,
    HeadConfig,
    LayeredHead,
    Unread,
    stacked,
)
from harness.local.drafting.heads.stored import StoredHead
from harness.local.models.cache_names import CACHE
from harness.local.runners.base import gather_rows
from harness.local.runners.slots import SlotCache


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """A configuration with the options of DFlash.

    Attributes:
        block_size: queries of one pass, as in training.
        mask_token_id: the token of a mask.
        from_anchor: whether the anchor predicts a token too, and not only the masks do.
        causal: whether a query sees only those of the block before it (JetSpec).
        causal_windows: the same in layers with a sliding window alone.
        windows_follow: whether a sliding window is counted from each query.
    """

    block_size: int
    mask_token_id: int
    from_anchor: bool
    causal: bool
    causal_windows: bool
    windows_follow: bool


class DFlash(LayeredHead):
    """DFlash, as speculators, z-lab and DeepSpec store it. Its layers are always in Qwen3's style.

    The block always has the size it was trained with: fewer masks would change what the others
    predict.
    """

    name = "dflash"
    title = "DFlash"
    config_type: ClassVar[type[HeadConfig]] = DFlashConfig
    config: DFlashConfig
    # What configurations leave out.
    usually_from_anchor: ClassVar[bool] = False
    usually_causal_windows: ClassVar[bool] = True

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        named = stored.named
        is_z_lab = "dflash_config" in stored.raw
        # DeepSpec stores copies of the target's matrices.
        fields = stored.layered(["embed_tokens", "lm_head"] if stored.is_deepspec else [])
        layer_config = fields["transformer"]
        kinds = getattr(layer_config, "layer_types", None) or ()
        if any("sliding" in kind for kind in kinds) and layer_config.sliding_window is None:
            # transformers drops the window of a Qwen3 configuration; MiMo's heads name it again.
            layer_config.sliding_window = named.get("swa_window_size")
        causal = named.get("is_causal", named.get("causal", named.get("causal_head")))
        causal_windows = False
        if stored.is_speculators:
            non_causal = named.get("sliding_window_non_causal", not cls.usually_causal_windows)
            causal_windows = not non_causal
        from_anchor = cls.usually_from_anchor or stored.is_deepspec
        return fields | {
            "block_size": stored.required("block_size"),
            "mask_token_id": stored.required("mask_token_id"),
            "from_anchor": named.get("sample_from_anchor", from_anchor),
            "causal": is_z_lab and bool(causal),
            "causal_windows": causal is None if is_z_lab else causal_windows,
            "windows_follow": is_z_lab,
        }

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config, "qwen3")
        layer_config: Any = config.transformer
        self.hidden_norm = LlamaRMSNorm(layer_config.hidden_size, layer_config.rms_norm_eps)
        self.most_tokens = config.block_size - (not config.from_anchor)

    def draft(self, unread: Unread, uniforms: Tensor, cache: SlotCache, draw: Draw) -> Draft:
        size = self.config.block_size
        # The token just decided has no features yet.
        anchor = gather_rows(unread.following, unread.last())
        self.read(unread, cache)
        masks = anchor.new_full((len(anchor), size - 1), self.config.mask_token_id)
        queries = self.embed(torch.cat([anchor.unsqueeze(1), masks], dim=1))
        cache.place(unread.starts + unread.counts, size)
        states = self(queries, cache)[:, size - self.most_tokens :]
        count = min(uniforms.shape[1], self.most_tokens)
        return self.draw_block(anchor, states[:, :count], uniforms[:, :count], draw)

    def draw_block(self, anchor: Tensor, states: Tensor, uniforms: Tensor, draw: Draw) -> Draft:
        """Draw K tokens after `anchor` [B] by their states [B, K, width] and uniforms [B, K]."""
        return draw(self.logits(states), uniforms)

    def num_written(self, num_unread: int, num_draft_tokens: int) -> int:
        """A whole block is written, however few tokens are drafted."""
        return num_unread + self.config.block_size

    def read(self, unread: Unread, cache: SlotCache) -> None:
        """Write keys and values of the target's features to `cache`."""
        cache.place(unread.starts, unread.features.shape[1])
        states = self.hidden_norm(self.fc(unread.features))
        cosine, sine = self.rotary_emb(states, cache.positions)
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            by_head = (*states.shape[:2], -1, attention.head_dim)
            plain_keys = attention.k_proj(states).view(by_head)
            values = attention.v_proj(states).view(by_head).transpose(1, 2)
            keys = attention.k_norm(plain_keys).transpose(1, 2)
            keys, _ = apply_rotary_pos_emb(keys, keys, cosine, sine)
            cache.update(keys, values, index)

    def forward(self, states: Tensor, cache: SlotCache) -> Tensor:
        """Pass embedded queries [B, block, width] of one block per row, at `cache.positions`.

        Returns their states [B, block, width], after the norm.
        """
        config = self.config
        positions = cache.positions
        rotary = self.rotary_emb(states, positions)
        for layer, window in zip(self.layers, self.windows, strict=True):
            if window is None:
                first = torch.zeros_like(positions)
            elif config.windows_follow:
                first = positions - window + 1
            else:
                first = (positions[:, :1] - window).expand_as(positions)
            is_causal = config.causal or (window is not None and config.causal_windows)
            last = positions if is_causal else positions[:, -1:].expand_as(positions)
            attention_inputs = {
                "attention_mask": cache.range_mask(first, last),
                "position_embeddings": rotary,
                CACHE: cache,
            }
            states = self.pass_layer(layer, states, attention_inputs)
        return self.norm(states)

    def pass_layer(self, layer: Any, states: Tensor, attention_inputs: Mapping[str, Any]) -> Tensor:
        """Pass states [B, block, width] through a layer; `attention_inputs` is for its attention."""
        return layer(states, **attention_inputs)


class JetSpec(DFlash):
    """JetSpec (arXiv:2606.18394), as its authors store it: in z-lab's format, with `causal_head`.

    A query sees only those before it in the block (`causal`), so what it predicts does not depend on
    how many masks follow. Its authors draft trees with it.
    """

    name = "jetspec"
    title = "JetSpec"


class CorrectedBlock(DFlash):
    """A DFlash head whose tokens are drawn one after the other."""

    @abstractmethod
    def corrected(
        self, states: Tensor, logits: Tensor, before: Tensor, index: int, memory: Any
    ) -> tuple[Tensor, Any]:
        """Return logits [B, V of the head] of the token at an index, and what the next one is to
        know.

        Args:
            states, logits: [B, width] and [B, V of the head], of the block at this index.
            before: [B], the token before it.
            memory: what was returned for the one before; None at the first one.
        """

    def draw_block(self, anchor: Tensor, states: Tensor, uniforms: Tensor, draw: Draw) -> Draft:
        logits = self.logits(states)
        drawn: list[Draft] = []
        before = anchor
        memory: Any = None
        for index, numbers in enumerate(uniforms.unbind(1)):
            corrected, memory = self.corrected(
                states[:, index], logits[:, index], before, index, memory
            )
            drawn.append(draw(corrected, numbers))
            before = drawn[-1].tokens
        return stacked(drawn)


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """A configuration with the options of DSpark.

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
    usually_from_anchor = True

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

    def corrected(
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
    usually_causal_windows = False

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        named = stored.named
        for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            # A cap of 1 bounds the logits, a factor of 1 changes nothing.
            if named.get(key) is not None and (named[key] != 1 or "capping" in key):
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

    def corrected(
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

    A score is the sum over the rank of predecessor, projected state and successor.
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
            # The anchor predicts where labels were shifted in training. Taken the wrong way, every
            # draft token is the one before its place, and nothing is accepted.
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

    def corrected(
        self, states: Tensor, logits: Tensor, before: Tensor, index: int, memory: Any
    ) -> tuple[Tensor, Any]:
        _, memory = self.prefix_gru(self.embed(before).unsqueeze(0), memory)
        if index >= self.config.num_uncorrected:
            logits = logits + self.embed_proj(torch.cat([states, memory[0]], dim=-1))
        return logits, memory
