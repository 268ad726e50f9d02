"""Draft heads of every kind with random weights, for small random targets."""

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from architectures import VOCABULARY, random_model
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.heads.block import DFlash
from harness.local.drafting.heads.drafter import HeadDrafter
from harness.local.drafting.heads.eagle import Eagle3
from harness.local.drafting.heads.head import Head
from harness.local.drafting.heads.medusa import Medusa
from harness.local.drafting.heads.mtp import MtpHead

WINDOW = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 5,
}


def head_drafter(head: Head, target: PreTrainedModel, warp: AnyWarp) -> HeadDrafter:
    head.borrow(target)
    return HeadDrafter(head, warp)


def config(kind: type[Head], **fields: Any) -> Any:
    """Of a head of this kind for `target_model`."""
    sizes = {"target_size": 32, "vocabulary_size": VOCABULARY, "draft_vocabulary_size": VOCABULARY}
    return kind.config_type(**(sizes | fields))


def block_head(
    style: str = "qwen3", window: bool = False, reduced: bool = False, **changes: Any
) -> DFlash:
    if reduced:
        changes |= {"draft_vocabulary_size": 60, "own_output": True}
    transformer = layer_config(style, 2, **(WINDOW if window else {}))
    usual = {
        "target_layers": (1, 3), "block_size": 5, "mask_token_id": 96, "from_anchor": False, "causal": False,
        "causal_windows": False, "windows_follow": False,
    }  # fmt: skip
    head = DFlash(config(DFlash, transformer=transformer, **(usual | changes)))
    randomize(head)
    if head.d2t is not None:
        head.d2t.copy_(torch.arange(60) // 2)
    return head


def target_model(seed: int = 0) -> PreTrainedModel:
    """Its distributions are flat enough for a random draft to be accepted now and then."""
    target = random_model("llama", seed=seed, head_dim=8)
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


def eagle_head(transformer: PreTrainedConfig, reduced: bool = False, **changes: Any) -> Eagle3:
    usual = {
        "target_layers": (1, 2, 3), "own_embedding": True, "own_output": True, "norm_before_residual": False,
        "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "draft_vocabulary_size": 60 if reduced else VOCABULARY,
    }  # fmt: skip
    head = Eagle3(config(Eagle3, transformer=transformer, **(usual | changes)))
    randomize(head)
    if head.d2t is not None:
        order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
        head.d2t.copy_(order[:60] - torch.arange(60))
    return head


def medusa_head(output_per_head: bool, num_heads: int = 4, num_blocks: int = 2) -> Medusa:
    options = {"num_heads": num_heads, "num_blocks": num_blocks, "output_per_head": output_per_head}
    head = Medusa(config(Medusa, target_layers=(3,), **options))
    randomize(head)
    return head


def mtp_head(layers: MtpModel) -> MtpHead:
    own, size = layers.config, layers.config.vocab_size
    sizes = {"vocabulary_size": size, "draft_vocabulary_size": size}
    head = MtpHead(config(MtpHead, target_layers=(2,), transformer=own, **sizes), layers)
    return head.eval().requires_grad_(False)
