"""Draft heads of every kind with random weights, for small random targets."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from architectures import VOCABULARY, random_model
from harness.local.drafting.heads.mtp import MtpHead
from harness.local.drafting.kinds.dflash import BlockConfig, BlockHead
from harness.local.drafting.kinds.dflash2 import SelectorConfig, SelectorHead
from harness.local.drafting.kinds.domino import DominoConfig, DominoHead
from harness.local.drafting.kinds.dspark import SparkConfig, SparkHead
from harness.local.drafting.kinds.eagle3 import EagleConfig, EagleHead
from harness.local.drafting.kinds.medusa import MedusaConfig, MedusaHead
from harness.local.drafting.kinds.peagle import MaskConfig, MaskHead

WINDOW = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 5,
}


def block_head(
    style: str = "qwen3", window: bool = False, reduced: bool = False, **changes: Any
) -> BlockHead:
    is_spark = "markov_rank" in changes or "confidence" in changes
    config = (SparkConfig if is_spark else BlockConfig)(
        layers=(1, 3),
        target_size=32,
        vocabulary_size=VOCABULARY,
        draft_vocabulary_size=60 if reduced else VOCABULARY,
        transformer=layer_config(style, 2, **(WINDOW if window else {})),
        block_size=5,
        mask_token_id=96,
        own_output=reduced,
        **changes,
    )
    head = SparkHead(config) if isinstance(config, SparkConfig) else BlockHead(config)
    randomize(head)
    if head.d2t is not None:
        head.d2t.copy_(torch.arange(60) // 2)
    return head


def selector_head(window: bool = False, **changes: Any) -> SelectorHead:
    config = SelectorConfig(
        layers=(1, 3),
        target_size=32,
        vocabulary_size=VOCABULARY,
        draft_vocabulary_size=VOCABULARY,
        transformer=layer_config("qwen3", 2, **(WINDOW if window else {})),
        block_size=5,
        mask_token_id=96,
        num_taps=2,
        group_size=8,
        selector_rank=6,
        num_candidates=7,
        **changes,
    )
    head = SelectorHead(config)
    randomize(head)
    return head


def domino_head(**changes: Any) -> DominoHead:
    config = DominoConfig(
        layers=(1, 3),
        target_size=32,
        vocabulary_size=VOCABULARY,
        draft_vocabulary_size=VOCABULARY,
        transformer=layer_config("qwen3", 2),
        block_size=5,
        mask_token_id=96,
        num_uncorrected=1,
        recurrent_size=12,
        inner_size=6,
        **changes,
    )
    head = DominoHead(config)
    randomize(head)
    return head


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
    has_masks = "mask_token_id" in changes
    config = (MaskConfig if has_masks else EagleConfig)(
        layers=(1, 2, 3),
        target_size=32,
        vocabulary_size=VOCABULARY,
        draft_vocabulary_size=60 if reduced else VOCABULARY,
        transformer=transformer,
        **{"own_embedding": True, "own_output": True, **changes},
    )
    head = MaskHead(config) if isinstance(config, MaskConfig) else EagleHead(config)
    randomize(head)
    if head.d2t is not None:
        head.d2t.copy_(
            torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:60]
            - torch.arange(60)
        )
    return head


def medusa_head(own_outputs: bool, num_heads: int = 4, num_blocks: int = 2) -> MedusaHead:
    config = MedusaConfig(
        layers=(3,),
        target_size=32,
        vocabulary_size=VOCABULARY,
        draft_vocabulary_size=VOCABULARY,
        num_heads=num_heads,
        num_blocks=num_blocks,
        own_outputs=own_outputs,
    )
    head = MedusaHead(config)
    randomize(head)
    return head


def mtp_head(layers: MtpModel) -> MtpHead:
    own, size = layers.config, layers.config.vocab_size
    config = EagleConfig(
        layers=(2,),
        target_size=32,
        vocabulary_size=size,
        draft_vocabulary_size=size,
        transformer=own,
    )
    return MtpHead(config, layers).eval().requires_grad_(False)
