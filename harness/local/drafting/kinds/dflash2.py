"""DFlash 2 (z-lab and Inco AI 2026): a DFlash head with convolutions, and a selector of tokens.

Each layer convolves the inputs and the outputs of its attention and of its MLP over the positions
of a block. At every position the selector keeps the likeliest tokens and adds to their logits how
well each follows the token before, so that tokens are drawn one after the other without another
pass. A "state" below is what comes out of the last layer at a position, and predicts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.local.drafting.heads.block_formats import block_fields
from harness.local.drafting.heads.formats import Shapes, StoredHead
from harness.local.drafting.kinds.dflash import BlockConfig, BlockHead, DFlash, SequentialDrafter

# The settings of published heads, for configurations without them.
_NUM_TAPS = 2
_GROUP_SIZE = 16
_RANK = 256
_NUM_CANDIDATES = 16
# Settings that some heads have and this file does not know, each with the values that change
# nothing. A cap of 1 would: it bounds the logits.
_UNKNOWN = {
    "input_embedding_scale": (None, 1),
    "output_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
}


@dataclass(frozen=True, kw_only=True)
class SelectorConfig(BlockConfig):
    """A DFlash 2 head.

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


class Convolutions(nn.Module):
    """Two convolutions over a block's positions: of the input and of the output of a part of a
    layer.

    With two taps, what comes out at a position is kernel[0] times its own state plus kernel[1]
    times the state before it, channel by channel. The kernel is `base_kernel`, plus what
    `kernel_projection` makes of the part's input at the position, for each group of channels.
    """

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        width = config.transformer.hidden_size
        self._num_taps = config.num_taps
        self._group_size = config.group_size
        num_groups = width // config.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, config.num_taps, width))
        self.kernel_projection = nn.Linear(width, 2 * config.num_taps * num_groups, bias=False)

    def around(self, part: Any, inputs: Tensor) -> Tensor:
        """Convolve inputs [B, block, width], apply `part`, and convolve what it returns."""
        # [B, block, 2, taps, groups], for the input and for the output.
        by_group = self.kernel_projection(inputs).unflatten(-1, (2, self._num_taps, -1))
        kernels = self.base_kernel + by_group.repeat_interleave(self._group_size, dim=-1)
        of_input, of_output = kernels.unbind(2)
        return _convolved(part(_convolved(inputs, of_input)), of_output)


def _convolved(states: Tensor, kernel: Tensor) -> Tensor:
    """Convolve states [B, block, width] by a kernel [B, block, taps, width].

    Before the first position of the block there are zeros.
    """
    length = states.shape[1]
    total = torch.zeros_like(states)
    for tap in range(kernel.shape[2]):
        earlier = nn.functional.pad(states, (0, 0, tap, 0))[:, :length]
        total = total + kernel[:, :, tap] * earlier
    return total


class Selector(nn.Module):
    """Scores how well a token follows another one, given the state that predicts it.

    A score is the sum over the rank of predecessor, projected state and successor.
    """

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        shape = config.vocabulary_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(shape))
        self.successor_codebook = nn.Parameter(torch.empty(shape))
        width = config.transformer.hidden_size
        self.hidden_projection = nn.Linear(width, config.selector_rank, bias=False)

    def scores(self, projected: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Score candidates [..., C] after tokens `before` [...]; projected states are [...,
        rank].
        """
        context = self.predecessor_codebook[before] * projected
        successors = self.successor_codebook[candidates]
        return (successors @ context.unsqueeze(-1)).squeeze(-1)


class SelectorDrafter(SequentialDrafter):
    """Proposes with a DFlash 2 head."""

    head: SelectorHead

    def logits_after(self, states: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Other tokens than the candidates have -inf."""
        logits = self._logits(states).float()
        selector = self.head.candidate_selector
        # [B, K, C], and [B, K, rank].
        likeliest, candidates = logits.topk(self.head.config.num_candidates)
        projected = selector.hidden_projection(states)

        def after(place: int, before: Tensor) -> Tensor:
            tokens = candidates[:, place]
            scores = likeliest[:, place] + selector.scores(projected[:, place], before, tokens)
            every_token = torch.full_like(logits[:, place], -torch.inf)
            return every_token.scatter_(-1, tokens, scores)

        return after


class SelectorHead(BlockHead):
    """The weights of a DFlash 2 head."""

    drafter_class = SelectorDrafter
    config: SelectorConfig

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__(config)
        layer: Any
        for layer in self.layers:
            layer.attention_conv = Convolutions(config)
            layer.mlp_conv = Convolutions(config)
        self.candidate_selector = Selector(config)

    def pass_layer(self, layer: Any, states: Tensor, how: Mapping[str, Any]) -> Tensor:
        def attend(inputs: Tensor) -> Tensor:
            return layer.self_attn(hidden_states=inputs, **how)[0]

        normed = layer.input_layernorm(states)
        states = states + layer.attention_conv.around(attend, normed)
        normed = layer.post_attention_layernorm(states)
        return states + layer.mlp_conv.around(layer.mlp, normed)


class DFlash2(DFlash):
    """DFlash 2, as speculators and z-lab store it."""

    name = "dflash2"
    head_class = SelectorHead

    def config(self, stored: StoredHead, shapes: Shapes | None) -> SelectorConfig:
        fields = block_fields(stored, shapes, from_anchor=False, causal_windows=False)
        settings = _settings(stored.raw)
        num_candidates = settings.get("selector_top_k") or _NUM_CANDIDATES
        config = SelectorConfig(
            **fields,
            num_taps=settings.get("conv_kernel_size") or _NUM_TAPS,
            group_size=settings.get("conv_group_size") or _GROUP_SIZE,
            selector_rank=settings.get("selector_rank") or _RANK,
            num_candidates=min(num_candidates, fields["vocabulary_size"]),
        )
        _check(stored, config)
        return config


def _check(stored: StoredHead, config: SelectorConfig) -> None:
    """Raise a SettingError for a head that this file would draft wrongly with."""
    for key, harmless in _UNKNOWN.items():
        # Heads of z-lab have them at either place.
        for place in (_settings(stored.raw), stored.raw):
            value = place.get(key)
            if value not in harmless:
                raise stored.refused(f"has {key}={value}, which is not supported")
    if config.draft_vocabulary_size != config.vocabulary_size:
        raise stored.refused("drafts some of the target's tokens only, which is not supported")
    width = config.transformer.hidden_size
    if width % config.group_size:
        rule = f"has conv_group_size={config.group_size}, which does not divide its width, {width}"
        raise stored.refused(rule)


def _settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that holds what DFlash 2 adds: z-lab nests it, speculators has
    it at the top.
    """
    return raw.get("dflash_config") or raw


RECORD = DFlash2()
